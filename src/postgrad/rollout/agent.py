"""Samples groups of rollouts: GRPO's generation, and with tools the agent loop. Without tools it is one turn of sampling.

Every rollout goes its own way, as fast as its own tools:

1. its environments are opened                            a job in a thread
2. a turn is sampled, beside those of all other rollouts  the sampler's stream, which rollouts enter and leave at any time
3. it is done, or its calls are executed                  `state.after_turn`; jobs in threads, journalled
4. the results are appended: the glue that the chat template puts around them, as TOOL tokens; on with 2

What a rollout becomes depends neither on how long tools took nor on which rollouts were sampled beside it (docs/decisions/0006).

Sampled ids are appended as sampled and never decoded and encoded again. When the template would render the history otherwise by now
(thinking models drop old thoughts), policy `append` keeps the tokens and counts it, policy `fork` starts a second training row.
What fails outside the model is tried once more from the start, then ends in INFRASTRUCTURE; a bug in postgrad is not caught.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from postgrad.errors import DataError, RunError
from postgrad.protocols import Completion, Finish, InfrastructureError, SampleKey, Sampler, SamplingParams, Stream, TurnRequest
from postgrad.rollout.declared import declared_tools
from postgrad.rollout.environments import Ending, ToolSession, end_session
from postgrad.rollout.episode import start_seed
from postgrad.rollout.execute import Calls, ToolLimits, refuse
from postgrad.rollout.journal import CallPlace, Journal, NoJournal
from postgrad.rollout.pool import Expired, Job, Pool
from postgrad.rollout.results import ErrorKind, exception_text, shorten_tokens
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
from postgrad.rollout.tools import Toolbox
from postgrad.types import Group, Message, Prompt, Segment, Source, StopReason, ToolResult, ToolSpec

if TYPE_CHECKING:
    from postgrad.chat import ChatFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How many rollouts go on, how many have ended, and the tokens sampled so far."""

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
    journal: Journal | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Group]:
    """One group of `config.group_size` rollouts per prompt, in the order of `prompts`.

    prompts:     (index in the run's order, prompt); the index keys the sampling noise together with `seed` and `step`.
    params:      `stop_ids` is completed with all of the chat format's end ids.
    journal:     what tools answered in this step, now and when an earlier process did it; None keeps no record.
    on_progress: told whenever a rollout has gone on.
    Raises `DataError` for a prompt that cannot be used, before anything is sampled, and `RunError` when the sampler returns a
    non-finite log-prob or when the infrastructure failed for every rollout.
    """
    params = replace(params, stop_ids=params.stop_ids | frozenset(chat.stop_ids))
    loop = _Loop(prompts, chat=chat, toolbox=toolbox, config=config, seed=seed, step=step, journal=journal or NoJournal())
    try:
        with sampler.stream(params, starts=list(loop.prompt_ids.values())) as stream:
            loop.run(stream, on_progress)
    finally:
        loop.close()
        sampler.forget()
    _refuse_total_failure(loop.states, step=step)
    return loop.groups()


@dataclass(frozen=True, slots=True)
class _Opening:
    """The environments of the rollout at `slot` are being made and reset."""

    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class _Calling:
    """The calls of the turn that the rollout at `slot` has just written. `before`: the rollout before the turn."""

    slot: int
    before: State
    turn: Turn
    calls: Calls


class _Loop:
    """One `collect`. Rollouts are known by their slot, their place in the order of prompts and samples."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        *,
        chat: ChatFormat,
        toolbox: Toolbox,
        config: RolloutConfig,
        seed: int,
        step: int,
        journal: Journal,
    ) -> None:
        self.prompts = dict(prompts)
        if len(self.prompts) < len(prompts):
            raise ValueError("two prompts have the same index: their samples would be the same")
        self.chat, self.toolbox, self.config, self.journal = chat, toolbox, config, journal
        self.seed, self.step = seed, step
        self.declared = {index: declared_tools(prompt.tools, known=toolbox.by_name, where=prompt.row) for index, prompt in prompts}
        self.rules = {
            index: Rules(config, frozenset(toolbox.by_name) | frozenset(declared), toolbox.terminal | frozenset(declared))
            for index, declared in self.declared.items()
        }
        self.limits = ToolLimits(
            deadline_s=config.tool_deadline_s,
            max_output_tokens=config.max_output_tokens,
            max_output_chars=config.max_output_chars,
            max_calls_per_turn=config.max_calls_per_turn,
            workers=config.tool_workers,
            cut=partial(shorten_tokens, encode=chat.encode, decode=chat.decode_raw),
        )
        self.resets = {index: self._reset_arguments(index, prompt) for index, prompt in prompts}
        self.open_s = max((item.open_s or config.tool_deadline_s for item in toolbox.environments), default=config.tool_deadline_s)
        self.prompt_ids = {index: self._prompt_ids(prompt) for index, prompt in prompts}
        self.states = [self._fresh(index, sample) for index, _ in prompts for sample in range(config.group_size)]
        self.slots = {self._key(state): slot for slot, state in enumerate(self.states)}
        self.sessions: dict[int, ToolSession] = {}
        self.shared = ToolSession(toolbox.bind(()) if not toolbox.environments else {})
        self.pool: Pool[_Opening | _Calling, Any] = Pool(config.tool_workers)
        self.closing: Pool[tuple[int, int], Ending] = Pool(config.tool_workers)
        self.ready: set[int] = set()
        """Slots whose next turn can be sampled."""
        self.numbers = count()

    # ---- the loop

    def run(self, stream: Stream, on_progress: Callable[[Progress], None] | None) -> None:
        """Until every rollout has ended."""
        for slot in range(len(self.states)):
            self._begin(slot)
        while self.ready or stream.busy or self.pool.busy:
            stream.submit([self._request(self.states[slot]) for slot in sorted(self.ready)])
            self.ready.clear()
            answers = stream.step() if stream.busy else []
            for request, answer in answers:
                self._sampled(self.slots[request.key], request, answer)
            finished = self.pool.finished(wait=not stream.busy and not self.ready)
            for work, outcomes in finished:
                self._answered(work, outcomes)
            if on_progress is not None and (answers or finished):
                on_progress(_progress(self.states))

    def _begin(self, slot: int) -> None:
        """Open the environments, if there are any; else the first turn can be sampled."""
        state = self.states[slot]
        if state.ready:
            self.ready.add(slot)
            return
        job = Job(partial(_try_open, self.toolbox, self.resets[state.index]), self.open_s, _close_late)
        self.pool.start(_Opening(slot), [[job]])

    def _answered(self, work: _Opening | _Calling, outcomes: Sequence[Sequence[Any]]) -> None:
        if isinstance(work, _Opening):
            [[outcome]] = outcomes
            session = f"reset: no result within {outcome.seconds:g} s" if isinstance(outcome, Expired) else outcome.value
            self._opened(work.slot, session)
        else:
            self._read(work, work.calls.results(outcomes))

    def _opened(self, slot: int, session: ToolSession | str) -> None:
        state = self.states[slot]
        if isinstance(session, str):
            self._spoil(slot, state, session)
            return
        self.sessions[slot] = session
        if session.observation:
            prompt = replace(state.prompt, messages=_with_observation(state.prompt.messages, session.observation))
            try:
                ids = self._prompt_ids(prompt)
            except DataError as error:  # the prompt alone was taken: it is the environment that said too much
                self._spoil(slot, state, f"reset: with what it returned, {error.what}")
                return
            state = replace(state, history=prompt.messages, segments=(Segment(Source.PROMPT, ids),))
        self._go_on(slot, replace(state, ready=True))

    def _sampled(self, slot: int, request: TurnRequest, answer: Completion | InfrastructureError) -> None:
        """A turn has ended: write it; then the rollout is done, or its calls are executed."""
        before = self.states[slot]
        if isinstance(answer, InfrastructureError):  # the rollout itself is whole: the same turn is asked for once more
            state = _spoiled(before, exception_text(answer))
            self._go_on(slot, state)
            return
        turn = self._turn(before, request, answer)
        state = self._write(before, turn)
        if state.stop is not None:
            self._go_on(slot, state)
            return
        self.states[slot] = state
        place = CallPlace(self.step, before.index, before.sample, before.restarts, before.turns, 0)
        session = self.sessions.get(slot, self.shared)
        session = replace(session, tools={**session.tools, **self.declared[before.index]})
        made = Counter(result.call.name for result in before.tool_results if result.call is not None and result.error != ErrorKind.LIMIT)
        calls = Calls(session, turn.calls, self.limits, place, self.journal, made)
        self.pool.start(_Calling(slot, before, turn, calls), calls.lanes)

    def _read(self, work: _Calling, results: tuple[ToolResult, ...]) -> None:
        """The calls of a turn have their results: the model reads them, or the rollout ends."""
        slot, state = work.slot, self.states[work.slot]
        failed = [result.content for result in results if result.error == ErrorKind.INFRASTRUCTURE]
        if failed:
            self._spoil(slot, work.before, failed[0].removeprefix("error: "))
            return
        state = replace(state, tool_results=state.tool_results + results)
        stop = after_results(state, results, self.rules[state.index])
        state = self._append(work.before, state, work.turn, results) if stop is None else replace(state, stop=stop)
        self._go_on(slot, state)

    def _go_on(self, slot: int, state: State) -> None:
        """Let the next turn be sampled, or close what an ended rollout has open."""
        self.states[slot] = state
        if state.stop is None:
            self.ready.add(slot)
        else:
            self._close(slot)

    def _spoil(self, slot: int, before: State, text: str) -> None:
        """A tool's infrastructure failed: the rollout begins again (its environments are in an unknown state), or ends as it was."""
        spoiled = _spoiled(before, text)
        self._close(slot)
        if spoiled.stop is None:
            fresh = self._fresh(before.index, before.sample)
            spoiled = replace(fresh, restarts=before.restarts + 1, infrastructure_errors=spoiled.infrastructure_errors)
        self.states[slot] = spoiled
        if spoiled.stop is None:
            self._begin(slot)

    def _reset_arguments(self, index: int, prompt: Prompt) -> list[dict[str, Any]]:
        return [item.reset_arguments(prompt, seed=start_seed(self.seed, index)) for item in self.toolbox.environments]

    def _fresh(self, index: int, sample: int) -> State:
        prompt = self.prompts[index]
        return State(
            index=index,
            sample=sample,
            prompt=prompt,
            history=prompt.messages,
            segments=(Segment(Source.PROMPT, self.prompt_ids[index]),),
            ready=not self.toolbox.environments,
        )

    def _key(self, state: State) -> SampleKey:
        return SampleKey(self.seed, self.step, state.index, state.sample)

    def _request(self, state: State) -> TurnRequest:
        return TurnRequest(self._key(state), state.turns, state.context, min(self.config.max_tokens, room(state, self.config)))

    # ---- one turn

    def _turn(self, state: State, request: TurnRequest, completion: Completion) -> Turn:
        _check_completion(state, request, completion)
        if state.prompt.raw_text is not None:
            return Turn(completion, Message("assistant", self.chat.decode(completion.token_ids)), ())
        parsed = self.chat.parse(completion.token_ids, self._shown(state.prompt), read=state.context)
        if not self._shown(state.prompt) and parsed.calls:  # nobody offered tools: what looks like a call is text
            return Turn(completion, self.chat.parse_text(completion.token_ids, read=state.context), ())
        message, calls = numbered(parsed.message, parsed.calls, start=len(state.tool_results))
        return Turn(completion, message, calls)

    def _write(self, state: State, turn: Turn) -> State:
        """Append the turn. When it is the last one, calls that could never run are still counted."""
        rules = self.rules[state.index]
        decision = after_turn(state, turn, rules)
        written = write_turn(state, turn, rules)
        if isinstance(decision, CallTools):
            return written
        refusals = () if turn.completion.finish is Finish.LENGTH else self._refusals(state, turn)
        return replace(written, stop=decision.stop, tool_results=written.tool_results + refusals)

    def _refusals(self, state: State, turn: Turn) -> tuple[ToolResult, ...]:
        tools = {**self.toolbox.by_name, **self.declared[state.index]}
        refused = (refuse(item, tools, self.limits) for item in turn.calls)
        return tuple(result for result in refused if result is not None)

    def _append(self, before: State, state: State, turn: Turn, results: tuple[ToolResult, ...]) -> State:
        """Let the model read the results: TOOL tokens, cut where the token budget ends."""
        answers = tuple(_tool_message(result) for result in results)
        tools = self._shown(state.prompt)
        glue = tuple(self.chat.glue(before.history, turn.message, answers, turn.completion.token_ids, tools))
        state = replace(state, history=state.history + answers, messages=state.messages + answers)
        rendered = self._rendered(state, tools)
        rewritten = self._rewritten(before, state, turn, answers, (*state.context, *glue), rendered)
        state = replace(state, rewrites=state.rewrites + rewritten)
        if rewritten and rendered is not None and self.config.history == "fork":
            return self._fork(state, glue, rendered)
        return self._extend(state, glue)

    def _rendered(self, state: State, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        """The next prompt as the template renders it; None when it refuses what the model wrote, such as two calls in one turn."""
        try:
            return tuple(self.chat.prompt_ids(state.history, tools))
        except DataError:
            return None

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

    def _rewritten(
        self, before: State, state: State, turn: Turn, answers: Sequence[Message], read: Sequence[int], rendered: Sequence[int] | None
    ) -> bool:
        """True when the template, rendering the next prompt, shows something else than what the model will have `read`.

        Texts are compared, not ids: the same text may be split into other tokens where two pieces meet. Where the text differs, it may
        still say the same in the template's own words (a space in the JSON of a call): the chat format knows.
        """
        if rendered is not None and self.chat.decode_raw(rendered) == self.chat.decode_raw(read):
            return False
        return self.chat.rewrites_history(before.history, turn.message, answers, self._shown(state.prompt))

    # ---- before and after

    def _shown(self, prompt: Prompt) -> tuple[ToolSpec, ...]:
        """The tools a prompt describes: the run's, and those that only this row brings."""
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

    def _close(self, slot: int) -> None:
        """Ask the environments of a rollout that has ended for its reward, and close them, beside what goes on."""
        session = self.sessions.pop(slot, None)
        if session is not None and session.instances:
            self._note_closed()
            self.closing.start((slot, next(self.numbers)), [[Job(partial(end_session, session), self.config.tool_deadline_s)]])

    def close(self) -> None:
        """Close what is open still, and wait for it."""
        self.pool.abandon()
        for slot in list(self.sessions):
            self._close(slot)
        while self.closing.busy:
            self._note_closed(wait=True)

    def _note_closed(self, *, wait: bool = False) -> None:
        """The reward goes to the rollout. One that cannot be had spoils it; a failing close is logged: the rollout itself is whole."""
        for (slot, _), [[outcome]] in self.closing.finished(wait=wait):
            ending = self._overdue(outcome.seconds) if isinstance(outcome, Expired) else outcome.value
            state = self.states[slot]
            if ending.problem:
                log.warning("an environment did not close: %s", ending.problem)
            if state.stop is None or state.stop is StopReason.INFRASTRUCTURE:  # the session of a try that was given up
                continue
            if ending.failure:
                errors = (*state.infrastructure_errors, ending.failure)
                state = replace(state, infrastructure_errors=errors, stop=StopReason.INFRASTRUCTURE)
            self.states[slot] = replace(state, environment_reward=ending.reward)

    def _overdue(self, seconds: float) -> Ending:
        """Nobody knows whether it was the reward or the closing that did not return: where a reward was to come, it is missing."""
        text = f"no result within {seconds:g} s"
        rewarding = any(hasattr(item.factory, "get_reward") for item in self.toolbox.environments)
        return Ending(failure=f"get_reward: {text}" if rewarding else "", problem=text)

    def groups(self) -> list[Group]:
        rollouts = [
            finished(state, text=self.chat.decode(state.completion), raw_text=self.chat.decode_raw(state.completion))
            for state in self.states
        ]
        size = self.config.group_size
        starts = range(0, len(rollouts), size)
        return [Group(prompt, tuple(rollouts[start : start + size])) for prompt, start in zip(self.prompts.values(), starts, strict=True)]


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


def _progress(states: Sequence[State]) -> Progress:
    live = sum(state.stop is None for state in states)
    sampled = sum(len(segment.logprobs) for state in states for row in (*state.forks, state.segments) for segment in row)
    return Progress(live, len(states) - live, sampled)


def _refuse_total_failure(states: Sequence[State], *, step: int) -> None:
    """Nothing to learn from, and nothing that a next step would change: stop instead of going on without data."""
    if states and all(state.stop is StopReason.INFRASTRUCTURE for state in states):
        what = f"all {len(states)} rollouts of step {step} failed twice: {states[0].infrastructure_errors[-1]}"
        raise RunError(what, hint="repair the server or the environment, then resume")
