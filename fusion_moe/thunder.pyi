from .integrations.thunder import *  # noqa: F403
