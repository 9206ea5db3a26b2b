"""Ranks with tokens of their own, and some of the experts each (`--data-parallel-size` with
`--enable-expert-parallel`): tokens go to their experts, and sums back, through memory that the
ranks of a node share; where that cannot be, by vLLM's collectives, which gather the tokens of all
and scatter sums, on GPUs only. There they may be asked for:

    --additional-config '{"fusion_moe": {"dispatch": "all_gather"}}'
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from ...errors import OptionError, UnsupportedError, need_one_of
from ...nn import Experts
from ..distributed.dispatch import Everywhere
from ..distributed.symmetric import GroupMemory, send_tokens
from ..serving import NAME, unsupported
from .log import logger

DISPATCH = ("all_gather", "symmetric")


def sends_tokens_(experts: Experts, moe: Any) -> bool:
    """Makes a rank's experts send tokens themselves, and returns whether they do. If they do not,
    tokens are gathered (`gather`), and a warning says why; UnsupportedError on CPUs, where vLLM
    cannot.

    moe: vLLM's configuration of the layer. All ranks call it for the same layers in one order.
    """
    if not moe.moe_parallel_config.use_all2all_kernels:
        return False
    why = why_gathered(moe)
    if not why:
        group, device = get_ep_group().device_group, experts.weight_of("down").device
        try:
            memory = GroupMemory.of_group(group, device)
        except UnsupportedError as error:
            why = str(error)
        else:
            layer = memory.layer(moe.num_experts, moe.hidden_dim)
            memory.allocate(moe.max_num_tokens)
            send_tokens(experts, layer, Everywhere(group.group_name, group.size(), True))
            logger.info_once("fusion_moe sends tokens through memory that the ranks share")
            return True
    if current_platform.is_cpu():
        raise not_gathered(why)
    logger.warning_once("fusion_moe leaves tokens to vLLM's collectives: %s", why)
    return False


def gather(experts: Experts, x: Tensor, ids: Tensor, w: Tensor, moe: Any) -> Tensor:
    """x [T, H], ids int[T, k], w [T, k] of this rank -> [T, H], sums over all ranks, by vLLM's
    collectives.

    vLLM would gather by itself, but before it routes, and 0.32 then has the mask of padding of one
    rank for the tokens of all, which its operation refuses.
    """
    group, parts = get_ep_group(), moe.moe_parallel_config.is_sequence_parallel
    x, w, ids = group.dispatch(x, w, ids, parts)
    return group.combine(experts(x, ids, w), parts)


def send(experts: Experts, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Sends tokens to the ranks of their experts through memory that the ranks share.

    The exchange takes equally many tokens of each rank, as those of CUDA graphs are: in other steps
    tokens without experts, which are not sent, fill up to the most that any rank has.
    """
    metadata = get_forward_context().dp_metadata
    assert metadata is not None
    tokens, most = len(x), max(metadata.get_chunk_sizes_across_dp_rank())
    if tokens < most:
        more = 0, 0, 0, most - tokens
        x, ids, w = F.pad(x, more), F.pad(ids, more, value=-1), F.pad(w, more)
    return experts(x, ids, w)[:tokens]


def why_gathered(moe: Any) -> str:
    """Why the ranks of a layer do not send tokens to each other, as far as vLLM's configuration
    says; "" if they may. OptionError for an unknown option.
    """
    ranks, config = moe.moe_parallel_config, get_current_vllm_config_or_none()
    reasons = {
        "--additional-config says so": _dispatch() != "symmetric",
        f"{moe.num_experts} experts, not equally many on each of {ranks.ep_size} ranks": (
            moe.num_experts % ranks.ep_size
        ),
        "ranks of tensor parallelism have the same tokens": (
            ranks.ep_size != ranks.dp_size * ranks.sp_size
        ),
    }
    if config is not None:
        reasons |= {
            "--enable-dbo": config.parallel_config.enable_dbo,
            "--enable-sleep-mode": getattr(config.model_config, "enable_sleep_mode", False),
            # which traces experts on CPUs, where they are no operation of vLLM's as on GPUs
            "torch.compile": current_platform.is_cpu() and not config.model_config.enforce_eager,
        }
    return next((why for why, holds in reasons.items() if holds), "")


def not_gathered(why: str) -> UnsupportedError:
    """The error on CPUs, where vLLM does not gather tokens."""
    return unsupported(
        "vLLM",
        f"ranks that have tokens of their own, which vLLM does not gather on CPUs ({why})",
        "whole experts on ranks of one node, without torch.compile",
        "--data-parallel-size with --enable-expert-parallel and --enforce-eager, or "
        "--tensor-parallel-size in its place",
    )


def _dispatch() -> str:
    """How tokens travel, by vLLM's --additional-config."""
    config, where = get_current_vllm_config_or_none(), "vLLM's --additional-config"
    more = config.additional_config if config is not None else {}
    inputs = dict(more.get(NAME) or {}) if isinstance(more, dict) else {}
    dispatch = inputs.pop("dispatch", "symmetric")
    need_one_of("dispatch", dispatch, DISPATCH, where=where)
    if inputs:
        raise OptionError(f"{NAME}: {', '.join(inputs)}", expected="dispatch", where=where)
    return dispatch
