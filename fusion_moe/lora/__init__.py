"""Adapters beside frozen weights: low-rank factors that train, merged, saved and loaded.

adapter.py       the factors; merging.py: merged into their weight; files/: on disk

The core knows of them what a call reads, nn's AdaptableModule; `fusion_moe.nn` has these names too.
"""

from .adapter import Adapter, add_lora_
from .merging import merge_lora_, remove_lora_

__all__ = ["Adapter", "add_lora_", "merge_lora_", "remove_lora_"]
