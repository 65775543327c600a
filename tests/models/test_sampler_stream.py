"""Requests that join and leave a stream at any time: what each becomes is the same to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from postgrad.errors import RunError
from postgrad.models.sampler import LocalSampler
from postgrad.protocols import Completion, SampleKey, SamplingParams, TurnRequest
from postgrad.testing.tiny import tiny_model

PARAMS = SamplingParams(temperature=0.9, stop_ids=frozenset({7, 9}))
Turns = dict[tuple[SampleKey, int], Completion]


def words(seed: int, count: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(14, 280) for _ in range(count))


START = words(99, 40)
FIRST = [
    TurnRequest(SampleKey(0, 1, prompt, sample), 0, START + words(prompt, 5 + 9 * prompt), 4 + 3 * sample)
    for prompt in range(4)
    for sample in range(3)
]


def next_turn(request: TurnRequest, answer: Completion) -> TurnRequest:
    more = words(1000 * request.key.prompt + request.key.sample + request.turn, 2 + 3 * request.turn)
    return TurnRequest(request.key, request.turn + 1, request.context + answer.token_ids + more, request.max_tokens)


def rollouts(dtype: torch.dtype | None, *, max_batch: int, delay: Callable[[TurnRequest], int], order: Sequence[int]) -> Turns:
    """Three turns of every rollout; between two turns of one, `delay` steps of the stream pass."""
    sampler = LocalSampler(tiny_model("llama"), decode=str, dtype=dtype, max_batch=max_batch)
    turns: Turns = {}
    away: list[tuple[int, TurnRequest]] = []
    with sampler.stream(PARAMS, starts=[request.context for request in FIRST]) as stream:
        stream.submit([FIRST[place] for place in order])
        for step in range(10_000):
            back = [request for due, request in away if due <= step]
            away = [(due, request) for due, request in away if due > step]
            stream.submit(back)
            for request, answer in stream.step() if stream.busy else []:
                assert isinstance(answer, Completion)
                turns[request.key, request.turn] = answer
                if request.turn < 2:
                    away.append((step + 1 + delay(request), next_turn(request, answer)))
            if not stream.busy and not away:
                return turns
    raise AssertionError("the stream never ended")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_when_a_rollout_comes_back_changes_no_bit_of_any_rollout(dtype: torch.dtype | None) -> None:
    rng = random.Random(0)
    together = rollouts(dtype, max_batch=64, delay=lambda request: 0, order=range(12))
    assert len(together) == 36
    for max_batch in (64, 5, 1):
        shuffled = random.Random(max_batch).sample(range(12), 12)
        assert rollouts(dtype, max_batch=max_batch, delay=lambda request: rng.randrange(40), order=shuffled) == together


def test_generate_is_a_stream_that_is_asked_once() -> None:
    sampler = LocalSampler(tiny_model("llama"), decode=str)
    turns = rollouts(None, max_batch=64, delay=lambda request: 0, order=range(12))
    assert sampler.generate(FIRST, PARAMS) == [turns[request.key, 0] for request in FIRST]


def test_a_request_that_joins_is_sampled_beside_those_that_are_there() -> None:
    live: list[int] = []
    sampler = LocalSampler(tiny_model("llama"), decode=str, progress=lambda tokens, rows: live.append(rows))
    slow = [TurnRequest(SampleKey(0, 0, 0, sample), 0, words(1, 9), 30) for sample in range(2)]
    late = TurnRequest(SampleKey(0, 0, 1, 0), 0, words(2, 9), 5)
    ended: list[SampleKey] = []
    with sampler.stream(SamplingParams()) as stream:
        stream.submit(slow)
        for step in range(60):
            if step == 3:
                stream.submit([late])
            if stream.busy:
                ended += [request.key for request, _ in stream.step()]
    assert ended[0] == late.key
    assert max(live) == 3


def test_a_request_without_room_for_a_token_comes_back_empty() -> None:
    sampler = LocalSampler(tiny_model("llama"), decode=str)
    with sampler.stream(PARAMS) as stream:
        stream.submit([TurnRequest(SampleKey(0, 0, 0, 0), 0, words(1, 4), 0)])
        [(_, answer)] = stream.step()
        assert isinstance(answer, Completion)
        assert answer.token_ids == ()
        assert not stream.busy


def test_two_turns_of_one_rollout_at_a_time_are_refused() -> None:
    sampler = LocalSampler(tiny_model("llama"), decode=str)
    with sampler.stream(PARAMS) as stream:
        stream.submit([FIRST[0]])
        with pytest.raises(RunError, match="they would draw the same noise"):
            stream.submit([FIRST[0]])
