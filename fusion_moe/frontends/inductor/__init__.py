"""torch.compile: a post-grad pass of Inductor replaces each region of translated calls by one
`fusion_moe::run` call.

    torch.compile(model, backend="fusion_moe")     Inductor and this pass; takes mode and options as
                                                   Inductor does
    fusion_moe.enable()                            the pass in every torch.compile of the process;
                                                   import alone changes nothing

Without a host compiler the same pass runs, and everything outside of the regions runs call by call.

fusion_pass.py   the pass; compile_graph.py, config.py: Inductor with it
dynamo.py        errors as they were raised; log_found.py: FUSION_MOE_LOG
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from ... import backends, options as switches, target
from ...errors import Error
from ...ir.text import text
from ...messages import count, waiting
from ..compiled import as_made, keep
from ..float_experts import warn_of_float_experts
from ..regions import Found, find_regions
from .compile_graph import compile_calls, compile_with, devices
from .config import separate
from .dynamo import as_it_is
from .fusion_pass import FusionPass, passes_set
from .log_found import is_logged, log_found


def backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """`torch.compile(..., backend="fusion_moe", mode=..., options=...)`: Inductor with the pass.

    options: Inductor's, and ours as "fusion_moe.<name>" (see options.py). OptionError for an
    unknown one.
    """
    own, rest = separate(options or {})
    try:
        switched = switches.current().replace(**own)
        for device in devices(inputs):  # where it could not run, it is not compiled
            target.check_device(backends.find(switched.target, device), device, "torch.compile")
        warn_of_float_experts(model)
        compiled, results = as_made(model, switched), list[Found]()
        with waiting("compiling a graph") as tell:

            def note(result: Found) -> None:
                results.append(result)
                programs = {text(region.fusion) for region in result.regions}
                tell(f"compiling {count(len(programs), 'program')} and the graph around")

            output = compile_with(
                FusionPass(switched, note, passes_set(rest)), model, inputs, mode, rest
            )
        keep(compiled)
        # the pass was not called: the code came from a cache
        if not results and compiled and is_logged():
            compiled.again(
                compile_calls, lambda graph, *_: log_found(find_regions(graph, switched))
            )
        return output
    except Error as error:
        raise as_it_is(error) from error.__cause__


def enable() -> None:
    """Has every torch.compile with Inductor in this process fuse as with backend="fusion_moe",
    under the options now in force, before passes already set.

    Called again, it only updates the options. Code that is already compiled stays as it is:
    `torch._dynamo.reset()` discards it.
    """
    inductor_config.post_grad_custom_pre_pass = FusionPass(switches.current(), then=passes_set({}))


def disable() -> None:
    """Undoes `enable`; passes that others have set stay."""
    others = passes_set({})
    inductor_config.post_grad_custom_pre_pass = (
        list(others) if len(others) > 1 else others[0] if others else None
    )
