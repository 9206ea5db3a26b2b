from .integrations.transformers import *  # noqa: F403
