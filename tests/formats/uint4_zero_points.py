"""A format of a user's own, whole: UINT4 with zero points for groups of 128, as AWQ and GPTQ.

codes        uint8   [..., N, K/2]    of 0 to 15; two a byte, the low nibble is the even k
block_scale  float16 [..., N, K/128]
zero_point   uint8   [..., N, K/128]  one a byte
"""

import torch

from fusion_moe.encodings import Element, Encoding, Scale

GROUP = 128


def _step(span, outer):
    """The scale of groups whose numbers, 0 among them, lie so far apart."""
    return torch.where(span == 0, 1.0, span / 15)


UINT4 = Encoding(
    "uint4_g128",
    Element.integers("uint4", bits=4, least=0),
    (
        Scale("block_scale", torch.float16, GROUP, _step),
        Scale("zero_point", torch.uint8, GROUP, zero_point=True),
    ),
)
