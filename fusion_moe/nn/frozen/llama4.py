"""The mixture-of-experts layer of Llama-4."""

from __future__ import annotations

from torch import Tensor, nn

from ...definitions.operations import restored
from .experts import NVFP4Experts


class Llama4MoE(nn.Module):
    """shared_expert(x) + the chosen experts of sigmoid(logit) * x: the router's weights scale the
    experts' inputs, and there is no softmax.

    router: [T, H] -> logits [T, E], or a tuple whose second element they are, as transformers'
    Llama4Router returns. experts: NVFP4Experts with scale_on="input". shared_expert: any module [T,
    H] -> [T, H]. top_k: experts per token, 1 in the published models.
    """

    def __init__(
        self, router: nn.Module, experts: NVFP4Experts, shared_expert: nn.Module, top_k: int = 1
    ):
        super().__init__()
        self.top_k = top_k
        self.router, self.experts, self.shared_expert = router, experts, shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [..., H] -> the layer's output [..., H] and the router's logits [...,
        E].
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = self.router(tokens)
        logits = routed[1] if isinstance(routed, tuple) else routed
        chosen, index = logits.topk(self.top_k)
        weights = chosen.float().sigmoid().to(logits.dtype)
        out = self.shared_expert(tokens) + self.experts(tokens, index, weights)
        return restored(out, hidden_states.shape[:-1]), restored(logits, hidden_states.shape[:-1])

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"top_k={self.top_k}"
