"""When a turn ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.models.stopping import StopRule
from postgrad.protocols import Finish, SamplingParams
from postgrad.testing.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def decode_bytes(ids: Sequence[int]) -> str:
    """One token a byte; 256 and above are special tokens without text."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def stops_after(ids: Sequence[int], rule: StopRule, max_tokens: int = 10_000) -> tuple[int, Finish] | None:
    """How many tokens are sampled, and why it ends there."""
    for count in range(1, len(ids) + 1):
        finish = rule.finish(ids[:count], max_tokens)
        if finish is not None:
            return count, finish
    return None


def expected_stop(ids: Sequence[int], stops: tuple[str, ...]) -> int | None:
    """The definition: the first token after which the text of the whole turn contains a stop string."""
    return next((count for count in range(1, len(ids) + 1) if any(stop in decode_bytes(ids[:count]) for stop in stops)), None)


@pytest.mark.parametrize("end", [2, 0, 77])
def test_each_of_several_end_ids_ends_the_turn(end: int) -> None:
    rule = StopRule(SamplingParams(stop_ids=frozenset({0, 2, 77})), decode)
    assert stops_after([5, 6, end, 7], rule) == (3, Finish.STOP_ID)


def test_a_stop_string_across_tokens_ends_with_the_token_that_completes_it() -> None:
    rule = StopRule(SamplingParams(stop_strings=("the end",)), decode)
    ids = TOKENIZER.encode("it is the end of it", add_special_tokens=False)
    found = stops_after(ids, rule)
    assert found is not None
    count, finish = found
    assert finish is Finish.STOP_STRING
    assert "the end" in decode(ids[:count])
    assert "the end" not in decode(ids[: count - 1])


def test_a_stop_string_inside_a_longer_token_ends_after_that_token() -> None:
    rule = StopRule(SamplingParams(stop_strings=("b",)), lambda ids: "".join({1: "x", 2: "abc"}[token] for token in ids))
    assert stops_after([1, 1, 2, 1], rule) == (3, Finish.STOP_STRING)


@pytest.mark.parametrize("stop", ["é", "日本", "x🎉", "🎉y", "\n\n", " ", "END "])
def test_stop_strings_of_several_bytes_and_of_blanks(stop: str) -> None:
    ids = list(f"ab xé 日本語 x🎉y \n\n END z {stop}".encode())
    rule = StopRule(SamplingParams(stop_strings=(stop,)), decode_bytes)
    assert stops_after(ids, rule) == (expected_stop(ids, (stop,)), Finish.STOP_STRING)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(list("aé🎉\n b".encode())), st.sampled_from([256, 300])), max_size=60),
    st.lists(st.text("aé🎉\n b", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_looking_at_a_tail_finds_what_looking_at_everything_finds(ids: list[int], stops: list[str]) -> None:
    rule = StopRule(SamplingParams(stop_strings=tuple(stops)), decode_bytes)
    found = stops_after(ids, rule)
    assert (found[0] if found else None) == expected_stop(ids, tuple(stops))


def test_special_tokens_without_text_between_the_parts_of_a_stop_string_do_not_hide_it() -> None:
    ids = [*b"ST", *[256] * 100, *b"OP"]
    rule = StopRule(SamplingParams(stop_strings=("STOP",)), decode_bytes)
    assert stops_after(ids, rule) == (len(ids), Finish.STOP_STRING)


def test_most_tokens_are_not_decoded_again() -> None:
    calls: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return decode_bytes(ids)

    rule = StopRule(SamplingParams(stop_strings=("</tool>",)), counting)
    ids = list(b"plain words without any markup " * 20)
    assert stops_after(ids, rule) is None
    assert len(calls) == len(set(ids))  # each kind of token once
    assert set(calls) == {1}


def test_the_limit_ends_the_turn_unless_an_end_id_or_a_stop_string_does() -> None:
    rule = StopRule(SamplingParams(stop_ids=frozenset({9}), stop_strings=("b",)), decode_bytes)
    assert stops_after([*b"aaa"], rule, max_tokens=2) == (2, Finish.LENGTH)
    assert stops_after([ord("a"), 9], rule, max_tokens=2) == (2, Finish.STOP_ID)
    assert stops_after([*b"ab"], rule, max_tokens=2) == (2, Finish.STOP_STRING)
