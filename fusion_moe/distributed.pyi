from .integrations.distributed import *  # noqa: F403
