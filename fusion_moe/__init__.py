"""fusion_moe: NVFP4 mixture-of-experts as custom operations that are traced, lowered to a fusion IR, compiled, and explained."""

from . import eager, errors, options
from .compile import run
from .errors import Untranslatable
from .ir.builder import FusionDefinition
from .translate import translator

__version__ = "0.1.0"

__all__ = ["FusionDefinition", "Untranslatable", "__version__", "eager", "errors", "options", "run", "translator"]
