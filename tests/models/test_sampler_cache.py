"""What the sampler keeps between turns and between rollouts: shared once, continued exactly, dropped when told, bounded."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
import torch

from postgrad.models.decode import FlatDecoder
from postgrad.models.kv import Stack
from postgrad.models.sampler import LocalSampler
from postgrad.models.serving import Serving
from postgrad.protocols import Completion, SampleKey, SamplingParams, TurnRequest
from postgrad.testing.tiny import ARCHITECTURES, Architecture, tiny_model

PARAMS = SamplingParams(temperature=0.9, stop_ids=frozenset({7, 9, 11}))
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers x (keys, values) x key-value heads x width x fp32


class Reading:
    """Counts the tokens that pass through the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        self.rows: list[int] = []
        original = Serving.hidden

        def counted(serving: Serving, ids: list[int], positions: list[int]) -> torch.Tensor:
            self.tokens += len(ids)
            self.rows.append(len(ids))
            return original(serving, ids, positions)

        monkeypatch.setattr(Serving, "hidden", counted)

    def take(self) -> int:
        tokens, self.tokens = self.tokens, 0
        self.rows.clear()
        return tokens


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def sampler_of(architecture: Architecture = "llama", **options: object) -> LocalSampler:
    return LocalSampler(tiny_model(architecture), decode=str, **options)  # type: ignore[arg-type]


def flat(sampler: LocalSampler) -> FlatDecoder:
    assert isinstance(sampler._decoder, FlatDecoder)
    return sampler._decoder


def words(seed: int, count: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(14, 280) for _ in range(count))


def group_of(context: tuple[int, ...], size: int, *, prompt: int = 0, max_tokens: int = 10) -> list[TurnRequest]:
    return [TurnRequest(SampleKey(0, 0, prompt, sample), 0, context, max_tokens) for sample in range(size)]


def next_turns(requests: Sequence[TurnRequest], answers: Sequence[Completion]) -> list[TurnRequest]:
    return [
        TurnRequest(r.key, r.turn + 1, r.context + a.token_ids + words(index, 3 + 5 * index), r.max_tokens)
        for index, (r, a) in enumerate(zip(requests, answers, strict=True))
    ]


def assert_alike(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish)
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=2e-5, rtol=0)


def stored_tokens(sampler: LocalSampler) -> int:
    return sum(len(row.ids) - len(row.prefix.ids) for row in flat(sampler).closed.values())


def test_a_shared_context_is_read_once_and_stored_once(reading: Reading) -> None:
    sampler = sampler_of()
    requests = group_of(words(0, 64), 8)
    answers = sampler.generate(requests, PARAMS)
    fed = sum(len(answer.token_ids) - 1 for answer in answers)  # the last token of a turn is not read until the next
    assert reading.take() == 64 + fed
    assert len({row.prefix for row in flat(sampler).closed.values()}) == 1
    assert flat(sampler).closed.nbytes() == (64 + fed) * BYTES_PER_TOKEN


def test_sharing_changes_no_sample() -> None:
    requests = group_of(words(0, 30), 6)
    together = sampler_of().generate(requests, PARAMS)
    assert_alike(together, [sampler_of().generate([request], PARAMS)[0] for request in requests])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_turns_on_a_kept_cache_equal_turns_from_scratch(architecture: Architecture) -> None:
    kept, scratch = sampler_of(architecture), sampler_of(architecture)
    requests = group_of(words(0, 20), 3) + group_of(words(1, 45), 3, prompt=1)
    for _ in range(4):
        answers = kept.generate(requests, PARAMS)
        scratch.forget()
        assert_alike(answers, scratch.generate(requests, PARAMS))
        requests = next_turns(requests, answers)


def test_the_next_turn_reads_only_what_is_new(reading: Reading) -> None:
    sampler = sampler_of()
    requests = group_of(words(0, 40), 4)
    answers = sampler.generate(requests, PARAMS)
    later = next_turns(requests, answers)
    reading.take()
    later_answers = sampler.generate(later, PARAMS)
    new = sum(len(b.context) - len(a.context) - len(c.token_ids) + 1 for a, b, c in zip(requests, later, answers, strict=True))
    assert reading.take() == new + sum(len(answer.token_ids) - 1 for answer in later_answers)


def test_a_context_that_departs_from_the_cache_uses_what_they_have_in_common(reading: Reading) -> None:
    """As when a template rewrites the last turn."""
    sampler = sampler_of()
    (request,) = group_of(words(0, 40), 1)
    (answer,) = sampler.generate([request], SamplingParams())
    rewritten = request.context + answer.token_ids[:4] + words(5, 6)
    later = TurnRequest(request.key, 1, rewritten, 1)
    reading.take()
    (continued,) = sampler.generate([later], PARAMS)
    assert reading.take() == 6
    assert_alike([continued], sampler_of().generate([later], PARAMS))


def test_a_context_that_departs_inside_the_prompt_starts_over() -> None:
    sampler = sampler_of()
    (request,) = group_of(words(0, 40), 1)
    sampler.generate([request], PARAMS)
    other = TurnRequest(request.key, 1, words(0, 20) + words(9, 30), 8)
    assert_alike(sampler.generate([other], PARAMS), sampler_of().generate([other], PARAMS))


def test_asking_again_gives_the_same_answer_from_the_cache(reading: Reading) -> None:
    sampler = sampler_of()
    requests = group_of(words(0, 40), 3)
    first = sampler.generate(requests, PARAMS)
    reading.take()
    assert_alike(sampler.generate(requests, PARAMS), first)
    assert reading.take() == sum(len(answer.token_ids) - 1 for answer in first)  # the prompt was not read again


def test_a_common_start_of_different_prompts_is_read_once(reading: Reading) -> None:
    system = words(0, 100)
    requests = [
        request for prompt in range(4) for request in group_of(system + words(1 + prompt, 5 + prompt), 2, prompt=prompt, max_tokens=1)
    ]
    answers = sampler_of().generate(requests, PARAMS)
    assert reading.take() == 100 + 5 + 6 + 7 + 8
    assert_alike(answers, [sampler_of().generate([request], PARAMS)[0] for request in requests])


def test_finished_rows_leave_the_batch(reading: Reading) -> None:
    sampler = sampler_of()
    requests = [TurnRequest(SampleKey(0, 0, 0, sample), 0, (20, 30), 2 * sample + 1) for sample in range(6)]
    sampler.generate(requests, SamplingParams())
    assert reading.rows[1:] == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1]


def test_places_of_finished_rows_are_reclaimed_when_half_are_unused() -> None:
    sampler = sampler_of()
    slots: list[int] = []
    sampler.progress = lambda done, live: slots.append(sum(len(rows) for _, rows in flat(sampler).own))
    requests = [TurnRequest(SampleKey(0, 0, 0, sample), 0, (20, 30), 3 * sample + 1) for sample in range(8)]
    sampler.generate(requests, SamplingParams())
    assert slots[1] == 7
    assert min(slots[1:]) == 1
    assert slots[1:] == sorted(slots[1:], reverse=True)
    assert flat(sampler).own == []  # nothing of the batch is left behind


def test_more_requests_than_places_are_answered_as_rows_finish(reading: Reading) -> None:
    requests = [request for prompt in range(5) for request in group_of(words(prompt, 10 + prompt), 4, prompt=prompt)]
    answers = sampler_of().generate(requests, PARAMS)
    reading.take()
    few = sampler_of(max_batch=6)
    most = 0

    def watch(done: int, live: int) -> None:
        nonlocal most
        most = max(most, live)

    few.progress = watch
    assert_alike(few.generate(requests, PARAMS), answers)
    assert most <= 6
    assert reading.take() < sum(10 + prompt for prompt in range(5)) + sum(len(answer.token_ids) for answer in answers)  # each prompt once


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    sampler = sampler_of()
    requests = [TurnRequest(SampleKey(0, 0, 0, sample), 0, (20, 30), 1) for sample in range(5)]
    answers = sampler.generate(requests, SamplingParams())
    grown = [
        TurnRequest(r.key, 1, r.context + a.token_ids + words(0, 1000 if index == 0 else 3), 2)
        for index, (r, a) in enumerate(zip(requests, answers, strict=True))
    ]
    held: list[int] = []
    sampler.progress = lambda done, live: held.extend(stack.capacity * len(rows) for stack, rows in flat(sampler).own)
    continued = sampler.generate(grown, SamplingParams())
    assert sum(held) < 2 * 1600
    assert_alike(continued, [sampler_of().generate([request], SamplingParams())[0] for request in grown])


def test_long_answers_outgrow_their_places() -> None:
    requests = group_of(words(0, 5), 2, max_tokens=150)
    answers = sampler_of().generate(requests, SamplingParams())
    model = tiny_model()
    for request, answer in zip(requests, answers, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([request.context + answer.token_ids])).logits[0].log_softmax(-1)[4:-1]
        expected = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=2e-5, rtol=0)


def test_forget_drops_everything() -> None:
    sampler = sampler_of()
    sampler.generate(group_of(words(0, 40), 3), PARAMS)
    assert flat(sampler).closed.nbytes() > 0
    sampler.forget()
    assert sampler._decoder is None


def test_forget_drops_every_cache_of_a_model_that_the_sampler_owns() -> None:
    sampler = sampler_of(dtype=torch.float32, owned=True)
    sampler.generate(group_of(words(0, 40), 3), PARAMS)
    assert flat(sampler).closed.nbytes() > 0
    held = list(flat(sampler).closed.values())  # somebody still holds the rows and their prefix
    sampler.forget()
    assert flat(sampler).closed.nbytes() == 0
    assert len(flat(sampler).prefixes) == 0
    assert held


def test_the_cache_stays_within_its_budget_and_only_costs_time() -> None:
    budget = 200 * BYTES_PER_TOKEN
    sampler = sampler_of(cache_bytes=budget)
    requests = [request for prompt in range(6) for request in group_of(words(prompt, 50), 2, prompt=prompt)]
    answers = sampler.generate(requests, PARAMS)
    assert 0 < flat(sampler).closed.nbytes() <= budget
    later = next_turns(requests, answers)
    assert_alike(sampler.generate(later, PARAMS), sampler_of().generate(later, PARAMS))


def test_what_is_counted_is_what_is_held() -> None:
    """Prefixes that lay in one stack do not keep its memory once their neighbours are dropped; no stack outlives its batch."""
    sampler = sampler_of(cache_bytes=200 * BYTES_PER_TOKEN)
    sampler.generate([request for prompt in range(6) for request in group_of(words(prompt, 50), 2, prompt=prompt)], PARAMS)
    closed = flat(sampler).closed
    blocks = [row.own for row in closed.values()] + [prefix.block for prefix in {row.prefix for row in closed.values()}]
    storages = {tensor.untyped_storage().data_ptr(): tensor for block in blocks for tensor in (*block.keys, *block.values)}
    assert sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) == closed.nbytes()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Stack]


def test_a_context_that_was_not_read_to_its_end_is_never_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of()
    requests = group_of(words(0, 40), 3)
    caught: list[BaseException] = []
    with monkeypatch.context() as patch:
        patch.setattr(Serving, "hidden", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        try:
            sampler.generate(requests, PARAMS)
        except KeyboardInterrupt as interrupt:
            caught.append(interrupt)  # its traceback keeps the half-made rows alive
    assert caught
    assert_alike(sampler.generate(requests, PARAMS), sampler_of().generate(requests, PARAMS))


def test_the_least_recently_used_rollout_is_dropped_first() -> None:
    sampler = sampler_of(cache_bytes=180 * BYTES_PER_TOKEN)
    for prompt in (0, 1, 0, 2):
        sampler.generate(group_of(words(prompt, 64), 1, prompt=prompt), SamplingParams())
    assert [key.prompt for key in flat(sampler).closed] == [0, 2]
