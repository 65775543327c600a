"""Rows fall into micro-batches without loss, always the same way, and every trained token is predicted from where it should be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.models.micro_batch import MicroBatch
from postgrad.models.packed import pack
from postgrad.models.padded import pad_rows
from postgrad.models.segments import Segment
from postgrad.types import TrainRow


def row(ids: list[int], trained: list[int], *, group: int | None = None, prefix: int = 0, **per_row: float) -> TrainRow:
    """`trained` lists positions."""
    flags = tuple(position in trained for position in range(len(ids)))
    values = {"weight": [float(10 * token) for token in ids]}
    return TrainRow(tuple(ids), flags, group=group, shared_prefix=prefix, per_token=values, per_row=per_row)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainRow]:
    """Groups of 1 to 4 rows behind a prefix of 0 to 6 tokens, any tokens behind it trained, shuffled; some rows alone."""
    rows = []
    for group in range(draw(st.integers(1, 4))):
        prefix = draw(st.lists(st.integers(1, 9), max_size=6))
        alone = draw(st.booleans())
        for _ in range(draw(st.integers(1, 4))):
            own = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=7))
            ids = prefix + [token for token, _ in own]
            trained = [len(prefix) + at for at, (_, flag) in enumerate(own) if flag and len(prefix) + at > 0]
            rows.append(row(ids, trained, group=None if alone else group, prefix=0 if alone else len(prefix)))
    return draw(st.permutations(rows))


def seen_by(batch: MicroBatch, place: int) -> list[int]:
    """The ids that the hidden state at `place` can see, by the micro-batch's own layout or mask, in order of position."""
    width = batch.input_ids.shape[1]
    if batch.layout is None:
        start = place - place % width
        visible = [at for at in range(start, place + 1) if batch.attention_mask.flatten()[at]]  # type: ignore[union-attr]
    else:
        segment = next(s for s in batch.layout.segments if s.start <= place < s.stop)
        visible = [*range(*(segment.prefix or (0, 0))), *range(segment.start, place + 1)]
    assert batch.position_ids.flatten()[visible].tolist() == list(range(len(visible)))
    return batch.input_ids.flatten()[visible].tolist()


@pytest.mark.parametrize("make", [pack, pad_rows])
@settings(max_examples=40, deadline=None)
@given(rows=batches(), budget=st.integers(1, 60), whole=st.booleans())
def test_each_trained_token_is_predicted_from_exactly_the_tokens_before_it(
    make: Callable[..., list[MicroBatch]], rows: list[TrainRow], budget: int, whole: bool
) -> None:
    found: dict[int, list[tuple[int, ...]]] = {}
    for batch in make(rows, tokens_per_micro_batch=budget, split_groups=not whole):
        places, targets = iter(batch.source.tolist()), iter(batch.targets.tolist())
        weights = iter(batch.flat(batch.per_token["weight"]).tolist())
        for index, count in zip(batch.row_index, batch.mask.sum(1).tolist(), strict=True):
            assert index not in found
            found[index] = []
            for _ in range(count):
                target = next(targets)
                assert next(weights) == 10.0 * target
                found[index].append((*seen_by(batch, next(places)), target))
    expected = {index: [one.token_ids[: at + 1] for at, trained in enumerate(one.trained) if trained] for index, one in enumerate(rows)}
    assert found == expected


@settings(max_examples=40, deadline=None)
@given(rows=batches(), budget=st.integers(1, 60))
def test_the_budget_holds_except_for_a_row_that_is_longer(rows: list[TrainRow], budget: int) -> None:
    for batch in pack(rows, tokens_per_micro_batch=budget):
        assert batch.computed_tokens <= budget or sum(batch.mask.any(1)) == 1
    for batch in pad_rows(rows, tokens_per_micro_batch=budget):
        assert batch.computed_tokens <= budget or sum(batch.mask.any(1)) == 1


@settings(max_examples=30, deadline=None)
@given(rows=batches(), budget=st.integers(1, 60))
def test_packing_is_deterministic_and_counts_what_it_repeats(rows: list[TrainRow], budget: int) -> None:
    first, second = (pack(rows, tokens_per_micro_batch=budget) for _ in range(2))
    assert [batch.row_index for batch in first] == [batch.row_index for batch in second]
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, second, strict=True))
    least = sum(batch.computed_tokens for batch in pack(rows, tokens_per_micro_batch=10_000))
    assert sum(batch.computed_tokens - batch.repeated_prefix_tokens for batch in first) == least


def test_a_group_computes_its_prompt_once() -> None:
    """Prompt 1 2 3; completions 4 5 and 6 7 8. The last token of each row predicts nothing, so it is not computed."""
    rows = [row([1, 2, 3, 4, 5], [3, 4], group=0, prefix=3), row([1, 2, 3, 6, 7, 8], [3, 4, 5], group=0, prefix=3)]
    (batch,) = pack(rows, tokens_per_micro_batch=100)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert batch.layout is not None
    assert batch.layout.segments == (Segment(0, 3), Segment(3, 4, (0, 3)), Segment(4, 6, (0, 3)))
    assert batch.source.tolist() == [2, 3, 2, 4, 5]
    assert batch.targets.tolist() == [4, 5, 6, 7, 8]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]


def test_rows_go_there_and_back() -> None:
    rows = [row([1, 2, 3, 4], [1, 3], advantage=0.5), row([5, 6], [], advantage=-1.0), row([7, 8, 9], [2], advantage=2.0)]
    (batch,) = pack(rows, tokens_per_micro_batch=100)
    order = list(batch.row_index)
    assert sorted(order) == [0, 1, 2]
    assert batch.per_row["advantage"].tolist() == [[0.5, -1.0, 2.0][index] for index in order]
    values = torch.arange(1.0, 4.0, requires_grad=True)
    in_rows = batch.to_rows(values)
    assert torch.equal(batch.flat(in_rows), values)
    assert in_rows[~batch.mask].abs().sum() == 0
    (in_rows * 2).sum().backward()
    assert values.grad.tolist() == [2.0, 2.0, 2.0]  # type: ignore[union-attr]
    assert [len(part) for part in batch.split(values)] == [[2, 0, 1][index] for index in order]


def test_a_row_without_trained_tokens_costs_nothing_but_keeps_its_place() -> None:
    (batch,) = pack([row([1, 2, 3], []), row([4, 5, 6], [])], tokens_per_micro_batch=2)
    assert (batch.computed_tokens, batch.trained_tokens, batch.untrained_rows) == (0, 0, 2)
    assert batch.row_index == (0, 1)
    assert batch.to_rows(torch.zeros(0)).shape == (2, 0)
    (padded,) = pad_rows([row([1, 2, 3], [])], tokens_per_micro_batch=2)
    assert (padded.computed_tokens, padded.row_index) == (0, (0,))


def test_a_group_larger_than_the_budget_is_split_and_its_prompt_repeated() -> None:
    rows = [row([1, 2, 3, 4, number], [4], group=0, prefix=3) for number in range(5, 9)]  # prompt 3, one token each
    split = pack(rows, tokens_per_micro_batch=5)
    assert [batch.row_index for batch in split] == [(0, 1), (2, 3)]
    assert [batch.repeated_prefix_tokens for batch in split] == [0, 3]
    (whole,) = pack(rows, tokens_per_micro_batch=5, split_groups=False)
    assert (whole.row_index, whole.computed_tokens) == ((0, 1, 2, 3), 7)


def test_equal_prompts_of_different_groups_are_not_mixed_up() -> None:
    """A group whose rows do not really share the prefix they claim is not made to share it."""
    rows = [row([1, 2, 9, 4], [3], group=0, prefix=3), row([1, 2, 3, 4], [3], group=0, prefix=3)]
    (batch,) = pack(rows, tokens_per_micro_batch=100)
    assert batch.input_ids.tolist() == [[1, 2, 9, 1, 2, 3]]
    with pytest.raises(ValueError, match="group 0 do not start with the same"):
        pack(rows, tokens_per_micro_batch=100, split_groups=False)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=30), budget=st.integers(1, 40))
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], budget: int) -> None:
    """For any limit, 2^k + 1 included (trl#3887: no packing at all there)."""
    rows = [row(list(range(length + 1)), [length]) for length in lengths]
    sizes = [batch.computed_tokens for batch in pack(rows, tokens_per_micro_batch=budget)]
    assert sum(sizes) == sum(lengths)
    assert all(one + other > budget for one, other in combinations(sizes, 2))


def test_a_number_that_only_some_rows_carry_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"row 1 carries \[\], row 0 carries \['advantage'\]"):
        pack([row([1, 2], [1], advantage=1.0), row([1, 2], [1])], tokens_per_micro_batch=10)


def test_no_rows_are_no_micro_batches() -> None:
    assert pack([], tokens_per_micro_batch=10) == []
    assert pad_rows([], tokens_per_micro_batch=10) == []


def test_without_sharing_each_row_has_its_own_prompt() -> None:
    rows = [row([1, 2, 3, 4], [3], group=0, prefix=3), row([1, 2, 3, 5], [3], group=0, prefix=3)]
    (batch,) = pack(rows, tokens_per_micro_batch=100, share_prefixes=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 1, 2, 3]]
    assert batch.layout is not None
    assert batch.layout.segments == (Segment(0, 3), Segment(3, 6))
