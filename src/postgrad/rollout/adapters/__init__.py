"""Environments written for other libraries, as environments of postgrad: name the result in `tools:` like a class of your own.

trl (`environment_factory`) · openenv (a server)
"""

from postgrad.rollout.adapters.openenv import openenv_environment
from postgrad.rollout.adapters.trl import trl_environment

__all__ = ["openenv_environment", "trl_environment"]
