"""Rollouts: what the model reads and writes, turn by turn, with tools or without."""

from postgrad.protocols import InfrastructureError
from postgrad.rollout.agent import Progress, collect
from postgrad.rollout.deadline import seconds_left
from postgrad.rollout.failures import ToolError
from postgrad.rollout.journal import call_key
from postgrad.rollout.metrics import rollout_metrics
from postgrad.rollout.record import group_from_json, group_to_json, rollout_from_json, rollout_to_json
from postgrad.rollout.results import ErrorKind
from postgrad.rollout.state import RolloutConfig
from postgrad.rollout.tools import Toolbox, ToolOptions, load_tools, make_toolbox, tool

__all__ = [
    "ErrorKind",
    "InfrastructureError",
    "Progress",
    "RolloutConfig",
    "ToolError",
    "ToolOptions",
    "Toolbox",
    "call_key",
    "collect",
    "group_from_json",
    "group_to_json",
    "load_tools",
    "make_toolbox",
    "rollout_from_json",
    "rollout_metrics",
    "rollout_to_json",
    "seconds_left",
    "tool",
]
