"""Samples groups of rollouts: GRPO's generation, and with tools the agent loop. Without tools it is one turn of sampling.

`collect` works in rounds, so that a result never depends on how long a tool took:

1. open the environments of rollouts that begin (or begin again)
2. sample one turn of every live rollout, in one call of the sampler
3. decide for each: it is done, or its calls are executed (`state.after_turn`)
4. execute all calls of all rollouts side by side
5. append results: the glue that the chat template puts around them, as TOOL tokens

Sampled ids are appended as sampled and never decoded and encoded again. When the template would render the history otherwise by now
(thinking models drop old thoughts), policy `append` keeps the tokens and counts it, policy `fork` starts a second training row.
What fails outside the model is tried once more from the start, then ends in INFRASTRUCTURE; a bug in postgrad is not caught.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from postgrad.errors import DataError, RunError
from postgrad.protocols import Completion, Finish, InfrastructureError, SampleKey, Sampler, SamplingParams, TurnRequest
from postgrad.rollout.execute import ToolLimits, execute, refuse
from postgrad.rollout.pool import Expired, Job, run_lanes
from postgrad.rollout.results import ErrorKind, exception_text
from postgrad.rollout.state import (
    CallTools,
    RolloutConfig,
    Rules,
    State,
    Turn,
    after_results,
    after_turn,
    finished,
    numbered,
    room,
    write_turn,
)
from postgrad.rollout.tools import Toolbox, ToolSession
from postgrad.types import Group, Message, Prompt, Segment, Source, StopReason, ToolResult, ToolSpec

if TYPE_CHECKING:
    from postgrad.chat import ChatFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """After a round: how many rollouts go on, how many have ended, and the tokens sampled so far."""

    round: int
    live: int
    done: int
    sampled_tokens: int


def collect(
    prompts: Sequence[tuple[int, Prompt]],
    *,
    sampler: Sampler,
    chat: ChatFormat,
    toolbox: Toolbox,
    config: RolloutConfig,
    params: SamplingParams,
    seed: int,
    step: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Group]:
    """One group of `config.group_size` rollouts per prompt, in the order of `prompts`.

    prompts: (index in the run's order, prompt); the index keys the sampling noise together with `seed` and `step`.
    params:  `stop_ids` is completed with all of the chat format's end ids.
    Raises `DataError` for a prompt that cannot be used, before anything is sampled, and `RunError` when the sampler returns a
    non-finite log-prob or when the infrastructure failed for every rollout.
    """
    params = replace(params, stop_ids=params.stop_ids | frozenset(chat.stop_ids))
    loop = _Loop(prompts, sampler=sampler, chat=chat, toolbox=toolbox, config=config, params=params, seed=seed, step=step)
    states = [loop.begin(index, sample) for index, _ in prompts for sample in range(config.group_size)]
    try:
        rounds = 0
        while any(state.stop is None for state in states):
            states = loop.round(states)
            rounds += 1
            if on_progress is not None:
                on_progress(_progress(rounds, states))
    finally:
        loop.close(list(loop.sessions))
        sampler.forget()
    _refuse_total_failure(states, step=step)
    return loop.groups(states)


class _Loop:
    """What stays the same during one `collect`, and the only thing that changes besides the states: the open `sessions`, by slot."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        *,
        sampler: Sampler,
        chat: ChatFormat,
        toolbox: Toolbox,
        config: RolloutConfig,
        params: SamplingParams,
        seed: int,
        step: int,
    ) -> None:
        self.prompts = dict(prompts)
        if len(self.prompts) < len(prompts):
            raise ValueError("two prompts have the same index: their samples would be the same")
        self.sampler, self.chat, self.toolbox, self.config, self.params = sampler, chat, toolbox, config, params
        self.seed, self.step = seed, step
        self.rules = Rules(config, frozenset(toolbox.by_name), toolbox.terminal)
        self.limits = ToolLimits(deadline_s=config.tool_deadline_s, max_output_chars=config.max_output_chars, workers=config.tool_workers)
        self.resets = {index: [item.reset_arguments(prompt) for item in toolbox.environments] for index, prompt in prompts}
        self.prompt_ids = {index: self._prompt_ids(prompt) for index, prompt in prompts}
        self.sessions: dict[int, ToolSession] = {}

    # ---- the rounds

    def begin(self, index: int, sample: int, *, infrastructure_errors: tuple[str, ...] = ()) -> State:
        prompt = self.prompts[index]
        return State(
            index=index,
            sample=sample,
            prompt=prompt,
            history=prompt.messages,
            segments=(Segment(Source.PROMPT, self.prompt_ids[index]),),
            ready=not self.toolbox.environments,
            infrastructure_errors=infrastructure_errors,
        )

    def round(self, states: Sequence[State]) -> list[State]:
        """Every live rollout goes on by one turn and the results of its calls."""
        states = self._open(states)
        turns = self._sample(states)
        if isinstance(turns, str):
            return [_spoiled(state, turns) if _samples(state) else state for state in states]
        after = [self._write(state, turns[slot]) if slot in turns else state for slot, state in enumerate(states)]
        pending = {slot: turn for slot, turn in turns.items() if after[slot].stop is None}
        for slot, results in self._execute(pending).items():
            after[slot] = self._read(states[slot], after[slot], pending[slot], results)
        self.close([slot for slot in self.sessions if after[slot].stop is not None or not after[slot].ready])
        return after

    def _open(self, states: Sequence[State]) -> list[State]:
        """Make and reset the environments of rollouts that begin, side by side."""
        opening = [slot for slot, state in enumerate(states) if state.stop is None and not state.ready]
        jobs = [
            Job(partial(_try_open, self.toolbox, self.resets[states[slot].index]), self.config.tool_deadline_s, _close_late)
            for slot in opening
        ]
        outcomes = run_lanes([[job] for job in jobs], workers=self.config.tool_workers)
        opened = list(states)
        for slot, [outcome] in zip(opening, outcomes, strict=True):
            session = f"reset: no result within {outcome.seconds:g} s" if isinstance(outcome, Expired) else outcome.value
            opened[slot] = self._opened(states[slot], slot, session)
        return opened

    def _opened(self, state: State, slot: int, session: ToolSession | str) -> State:
        if isinstance(session, str):
            return _spoiled(state, session)
        self.sessions[slot] = session
        if not session.observation:
            return replace(state, ready=True)
        prompt = replace(state.prompt, messages=_with_observation(state.prompt.messages, session.observation))
        return replace(state, ready=True, history=prompt.messages, segments=(Segment(Source.PROMPT, self._prompt_ids(prompt)),))

    def _sample(self, states: Sequence[State]) -> dict[int, Turn] | str:
        """The next turn of every live rollout, by slot; or, when the sampler's infrastructure failed, what it said."""
        requests = {slot: self._request(state) for slot, state in enumerate(states) if _samples(state)}
        if not requests:
            return {}
        try:
            completions = self.sampler.generate(list(requests.values()), self.params)
        except InfrastructureError as error:
            return exception_text(error)
        return {
            slot: self._turn(states[slot], request, completion)
            for (slot, request), completion in zip(requests.items(), completions, strict=True)
        }

    def _request(self, state: State) -> TurnRequest:
        key = SampleKey(self.seed, self.step, state.index, state.sample)
        return TurnRequest(key, state.turns, state.context, min(self.config.max_tokens, room(state, self.config)))

    def _turn(self, state: State, request: TurnRequest, completion: Completion) -> Turn:
        _check_completion(state, request, completion)
        if state.prompt.raw_text is not None:
            return Turn(completion, Message("assistant", self.chat.decode(completion.token_ids)), ())
        parsed = self.chat.parse(completion.token_ids)
        if not self._shown(state.prompt) and parsed.calls:  # nobody offered tools: what looks like a call is text
            return Turn(completion, Message("assistant", self.chat.decode(completion.token_ids)), ())
        message, calls = numbered(parsed.message, parsed.calls, start=len(state.tool_results))
        return Turn(completion, message, calls)

    def _write(self, state: State, turn: Turn) -> State:
        """Append the turn. When it is the last one, calls that could never run are still counted."""
        decision = after_turn(state, turn, self.rules)
        written = write_turn(state, turn, self.rules)
        if isinstance(decision, CallTools):
            return written
        refusals = () if turn.completion.finish is Finish.LENGTH else self._refusals(turn)
        return replace(written, stop=decision.stop, tool_results=written.tool_results + refusals)

    def _refusals(self, turn: Turn) -> tuple[ToolResult, ...]:
        refused = (refuse(item, self.toolbox.by_name, self.limits) for item in turn.calls)
        return tuple(result for result in refused if result is not None)

    def _execute(self, pending: Mapping[int, Turn]) -> dict[int, tuple[ToolResult, ...]]:
        shared = ToolSession(self.toolbox.bind(()) if not self.toolbox.environments else {})
        turns = [(self.sessions.get(slot, shared), turn.calls) for slot, turn in pending.items()]
        return dict(zip(pending, execute(turns, self.limits), strict=True))

    def _read(self, before: State, state: State, turn: Turn, results: tuple[ToolResult, ...]) -> State:
        """The rollout with the results of its calls. `before` is the rollout before the turn."""
        failed = [result.content for result in results if result.error == ErrorKind.INFRASTRUCTURE]
        if failed:
            return self._again(before, failed[0].removeprefix("error: "))
        state = replace(state, tool_results=state.tool_results + results)
        stop = after_results(state, results, self.rules)
        return self._append(before, state, turn, results) if stop is None else replace(state, stop=stop)

    def _again(self, before: State, text: str) -> State:
        """A tool's infrastructure failed: the rollout begins again (its environments are in an unknown state), or ends as it was."""
        spoiled = _spoiled(before, text)
        if spoiled.stop is not None:
            return spoiled
        return self.begin(before.index, before.sample, infrastructure_errors=spoiled.infrastructure_errors)

    def _append(self, before: State, state: State, turn: Turn, results: tuple[ToolResult, ...]) -> State:
        """Let the model read the results: TOOL tokens, cut where the token budget ends."""
        answers = tuple(_tool_message(result) for result in results)
        tools = self._shown(state.prompt)
        glue = tuple(self.chat.glue(before.history, turn.message, answers, turn.completion.token_ids, tools))
        state = replace(state, history=state.history + answers, messages=state.messages + answers)
        rendered = tuple(self.chat.prompt_ids(state.history, tools))
        rewritten = self._rewritten((*before.history, turn.message), rendered, tools)
        state = replace(state, rewrites=state.rewrites + rewritten)
        if rewritten and self.config.history == "fork":
            return self._fork(state, glue, rendered)
        return self._extend(state, glue)

    def _extend(self, state: State, glue: tuple[int, ...]) -> State:
        left = room(state, self.config)
        kept = glue[:left]
        segments = (*state.segments, Segment(Source.TOOL, kept)) if kept else state.segments
        stop = StopReason.TOTAL_TOKENS if len(glue) >= left else None
        return replace(state, segments=segments, completion=state.completion + kept, stop=stop)

    def _fork(self, state: State, glue: tuple[int, ...], rendered: tuple[int, ...]) -> State:
        """A new row that starts with what the template renders. Where it would not fit, the rollout ends with the row it has."""
        forked = replace(
            state,
            forks=(*state.forks, state.segments),
            segments=(Segment(Source.PROMPT, rendered),),
            completion=state.completion + glue,
        )
        return forked if room(forked, self.config) > 0 else replace(self._extend(state, glue), stop=StopReason.TOTAL_TOKENS)

    def _rewritten(self, history: Sequence[Message], rendered: Sequence[int], tools: Sequence[ToolSpec]) -> bool:
        """True when the template, rendering the next prompt, no longer starts with what it printed while the last turn was the last.

        Texts are compared, not ids: the same text may be split into other tokens where two pieces meet.
        """
        try:
            printed = self.chat.last_turn(history, tools)
        except DataError:  # the template has no way to print this turn as the model saw it, such as its reasoning
            return True
        end = max(place for place, source in enumerate(printed.source) if source == "assistant") + 1
        return not self.chat.decode_raw(rendered).startswith(self.chat.decode_raw(printed.token_ids[:end]))

    # ---- before and after

    def _shown(self, prompt: Prompt) -> tuple[ToolSpec, ...]:
        """The tools a prompt describes: the run's, and those that only this row brings (calling one of these is an unknown tool)."""
        return (*self.toolbox.specs, *prompt.tools)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        ids = self._encoded(prompt)
        limit = self.config.max_context_tokens
        if limit is not None and len(ids) >= limit:
            what = f"the prompt has {len(ids)} tokens, the model takes {limit} and would have none left to write"
            raise DataError(what, where=prompt.row, hint="shorten the prompt, or drop long ones with data.max_length")
        return ids

    def _encoded(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.raw_text is None:
            return tuple(self.chat.prompt_ids(prompt.messages, self._shown(prompt)))
        if self.toolbox:
            hint = "write the prompts as messages: results are put between turns by the chat template"
            raise DataError("tools need prompts that are conversations, and this one is plain text", where=prompt.row, hint=hint)
        return tuple(self.chat.raw_prompt_ids(prompt.raw_text))

    def close(self, slots: Iterable[int]) -> None:
        """Close environments of rollouts that ended, however they ended. A failing close is logged: the rollout itself is whole."""
        sessions = [self.sessions.pop(slot) for slot in list(slots)]
        jobs = [[Job(partial(_try_close, session), self.config.tool_deadline_s)] for session in sessions if session.instances]
        for [outcome] in run_lanes(jobs, workers=self.config.tool_workers):
            problem = f"no result within {outcome.seconds:g} s" if isinstance(outcome, Expired) else outcome.value
            if problem:
                log.warning("an environment did not close: %s", problem)

    def groups(self, states: Sequence[State]) -> list[Group]:
        rollouts = [
            finished(state, text=self.chat.decode(state.completion), raw_text=self.chat.decode_raw(state.completion)) for state in states
        ]
        size = self.config.group_size
        starts = range(0, len(rollouts), size)
        return [Group(prompt, tuple(rollouts[start : start + size])) for prompt, start in zip(self.prompts.values(), starts, strict=True)]


def _samples(state: State) -> bool:
    return state.stop is None and state.ready


def _spoiled(state: State, text: str) -> State:
    """Something outside the model failed: once is tried again, twice masks the rollout out."""
    errors = (*state.infrastructure_errors, text)
    return replace(state, infrastructure_errors=errors, stop=StopReason.INFRASTRUCTURE if len(errors) > 1 else None)


def _check_completion(state: State, request: TurnRequest, completion: Completion) -> None:
    where = f"{state.prompt.row}, sample {state.sample}, turn {state.turns}"
    if not all(math.isfinite(value) for value in completion.logprobs):
        raise RunError("the sampler returned a non-finite log-prob", where=where, hint="the model's weights or its dtype are at fault")
    if len(completion.token_ids) > request.max_tokens:
        raise RuntimeError(f"{where}: the sampler wrote {len(completion.token_ids)} tokens, allowed were {request.max_tokens}")


def _try_open(toolbox: Toolbox, resets: Sequence[Mapping[str, Any]]) -> ToolSession | str:
    try:
        return toolbox.open(resets)
    except BaseException as error:  # the environment's code: whatever it raises, the model has no part in it
        return f"reset: {exception_text(error)}"


def _try_close(session: ToolSession) -> str:
    try:
        session.close()
    except BaseException as error:  # the environment's code
        return exception_text(error)
    return ""


def _close_late(session: ToolSession | str) -> None:
    if isinstance(session, ToolSession):
        session.close()


def _with_observation(messages: tuple[Message, ...], observation: str) -> tuple[Message, ...]:
    """The first observation of an environment ends the last user message."""
    if not messages or messages[-1].role != "user":
        return (*messages, Message("user", observation))
    return (*messages[:-1], replace(messages[-1], content=f"{messages[-1].content}\n\n{observation}"))


def _tool_message(result: ToolResult) -> Message:
    call = result.call
    return Message("tool", result.content, tool_call_id=call.id if call else "", name=call.name if call else "")


def _progress(rounds: int, states: Sequence[State]) -> Progress:
    live = sum(state.stop is None for state in states)
    sampled = sum(len(segment.logprobs) for state in states for row in (*state.forks, state.segments) for segment in row)
    return Progress(rounds, live, len(states) - live, sampled)


def _refuse_total_failure(states: Sequence[State], *, step: int) -> None:
    """Nothing to learn from, and nothing that a next step would change: stop instead of going on without data."""
    if states and all(state.stop is StopReason.INFRASTRUCTURE for state in states):
        what = f"all {len(states)} rollouts of step {step} failed twice: {states[0].infrastructure_errors[-1]}"
        raise RunError(what, hint="repair the server or the environment, then resume")
