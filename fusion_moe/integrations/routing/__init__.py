"""Routing replay: which experts a model's routers choose is recorded in one place, a rollout, and
replayed in another, the training step on its tokens.

layers.py    a model's layers of experts, and their routers
routing.py   what was recorded, indexed by tokens; vLLM's form of it
record.py    while a model runs, recorded
replay.py    while a model runs, given to its routers, or to its experts

Works on modules whose call is (tokens, ids, weights): those that transformers' experts interface
has, and this library's. None of transformers is imported.
"""

from .record import record_routing
from .replay import Replay, replay_routing
from .routing import Routing

__all__ = ["Replay", "Routing", "record_routing", "replay_routing"]
