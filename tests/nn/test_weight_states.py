"""State dicts, bytes in memory and results of each kind of module are those of earlier releases."""

from __future__ import annotations

import pytest
import torch
import weight_states as states
from experts import same_state

MADE = torch.load(states.FILE)
MODULES = dict(states.cases())


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("weights", states.WEIGHTS)
def test_states_load_and_are_read_as_before(name, weights):
    module, before = MODULES[name], MADE[name]
    for t in (*module.parameters(), *module.buffers()):
        t.detach().as_subclass(torch.Tensor).reshape(-1).view(torch.uint8).zero_()
    module.load_state_dict(before["state"])
    assert states.prepared(module, weights) == _as_named_now(before[weights])
    assert same_state(states.state(module), before["state"])
    module.load_state_dict(before["state"])  # in the layout and the policy that it has
    assert same_state(states.state(module), before["state"])


def _as_named_now(prepared):
    """The file calls what is requantized to FP8 folded."""
    names = {target: prepared[target].items() for target in states.TARGETS}
    return prepared | {
        target: {name.replace("folded", "requantized"): t for name, t in items}
        for target, items in names.items()
    }


def test_all_kinds_are_there():
    assert MODULES.keys() == MADE.keys()
