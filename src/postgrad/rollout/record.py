"""Groups as JSON and back, exactly: ids, log-probs to the last bit, mask (through the segments' sources), stop reason, tool results.

The same form serves the rollout files of a run and the rollout buffer of a checkpoint. Python writes a float with the digits that read
back to the same bits, so nothing is lost in text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult, ToolSpec

Json = dict[str, Any]


def group_to_json(group: Group) -> Json:
    """A JSON object that `group_from_json` turns back into an equal group. The prompt's columns must be JSON values themselves."""
    return {"prompt": _prompt_to_json(group.prompt), "rollouts": [rollout_to_json(rollout) for rollout in group.rollouts]}


def group_from_json(data: Mapping[str, Any]) -> Group:
    return Group(_prompt_from_json(data["prompt"]), tuple(rollout_from_json(item) for item in data["rollouts"]))


def rollout_to_json(rollout: Rollout) -> Json:
    return {
        "sample": rollout.sample,
        "stop": rollout.stop.value,
        "messages": _messages_to_json(rollout.messages),
        "segments": _row_to_json(rollout.segments),
        "forks": [_row_to_json(row) for row in rollout.forks],
        "tool_results": [_result_to_json(result) for result in rollout.tool_results],
        "text": rollout.text,
        "raw_text": rollout.raw_text,
        "rewrites": rollout.rewrites,
        "infrastructure_errors": list(rollout.infrastructure_errors),
        "environment_reward": rollout.environment_reward,
    }


def rollout_from_json(data: Mapping[str, Any]) -> Rollout:
    return Rollout(
        segments=_row_from_json(data["segments"]),
        messages=_messages_from_json(data["messages"]),
        stop=StopReason(data["stop"]),
        sample=data["sample"],
        tool_results=tuple(_result_from_json(item) for item in data["tool_results"]),
        forks=tuple(_row_from_json(row) for row in data["forks"]),
        text=data["text"],
        raw_text=data["raw_text"],
        rewrites=data["rewrites"],
        infrastructure_errors=tuple(data["infrastructure_errors"]),
        environment_reward=data.get("environment_reward"),
    )


def _prompt_to_json(prompt: Prompt) -> Json:
    return {
        "row": prompt.row,
        "messages": _messages_to_json(prompt.messages),
        "columns": dict(prompt.columns),
        "raw_text": prompt.raw_text,
        "tools": [tool.to_json() for tool in prompt.tools],
    }


def _prompt_from_json(data: Mapping[str, Any]) -> Prompt:
    tools = tuple(_tool_from_json(item) for item in data.get("tools", ()))
    return Prompt(data["row"], _messages_from_json(data["messages"]), data["columns"], data["raw_text"], tools)


def _tool_from_json(data: Json) -> ToolSpec:
    function = data["function"]
    return ToolSpec(function["name"], function["description"], function["parameters"])


def _row_to_json(row: Sequence[Segment]) -> list[Json]:
    return [{"source": segment.source.value, "token_ids": list(segment.token_ids), "logprobs": list(segment.logprobs)} for segment in row]


def _row_from_json(row: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment(Source(item["source"]), tuple(item["token_ids"]), tuple(item["logprobs"])) for item in row)


def _messages_to_json(messages: Sequence[Message]) -> list[Json]:
    return [_message_to_json(message) for message in messages]


def _messages_from_json(data: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(_message_from_json(item) for item in data)


def _message_to_json(message: Message) -> Json:
    """Only what the message says: a field at its default is left out."""
    data: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [_call_to_json(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name", "reasoning"):
        if value := getattr(message, name):
            data[name] = value
    if message.train is not None:
        data["train"] = message.train
    return data


def _message_from_json(data: Mapping[str, Any]) -> Message:
    calls = tuple(_call_from_json(item) for item in data.get("tool_calls", ()))
    return Message(**{**data, "tool_calls": calls})


def _call_to_json(call: ToolCall) -> Json:
    return {"name": call.name, "arguments": dict(call.arguments), "id": call.id}


def _call_from_json(data: Mapping[str, Any]) -> ToolCall:
    return ToolCall(data["name"], data["arguments"], data["id"])


def _result_to_json(result: ToolResult) -> Json:
    call = None if result.call is None else _call_to_json(result.call)
    said: Json = {} if result.reward is None else {"reward": result.reward}
    said |= {"done": True} if result.done else {}
    return {"call": call, "content": result.content, "error": str(result.error), "seconds": result.seconds, **said}


def _result_from_json(data: Mapping[str, Any]) -> ToolResult:
    call = None if data["call"] is None else _call_from_json(data["call"])
    return ToolResult(call, data["content"], data["error"], data["seconds"], data.get("reward"), data.get("done", False))
