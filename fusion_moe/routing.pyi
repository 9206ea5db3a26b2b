from .integrations.routing import *  # noqa: F403
