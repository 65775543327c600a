"""The test doubles themselves."""

from __future__ import annotations

from typing import Any

import pytest

from postgrad.protocols import Completion, Finish, SampleKey, Sampler, SamplingParams, TurnRequest
from postgrad.testing import ScriptedPolicy, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PARAMS = SamplingParams(stop_ids=frozenset({0, 2}))


def request(prompt: int = 0, sample: int = 0, turn: int = 0, max_tokens: int = 20) -> TurnRequest:
    return TurnRequest(SampleKey(0, 0, prompt, sample), turn, (1, 5), max_tokens)


def complete(script: Any, *requests: TurnRequest, params: SamplingParams = PARAMS) -> list[Completion]:
    policy: Sampler = ScriptedPolicy(script, tokenizer=TOKENIZER)
    return policy.generate(requests or [request()], params)


def test_text_is_encoded_and_ended() -> None:
    [completion] = complete(["hi"])
    assert TOKENIZER.decode(completion.token_ids) == "hi<|im_end|>"
    assert completion.logprobs == (-0.5,) * 3
    assert completion.finish is Finish.STOP_ID


def test_a_turn_stops_at_the_first_end_id_whichever_it_is() -> None:
    assert complete([[7, 0, 8]])[0].token_ids == (7, 0)
    assert complete(["a<|im_end|>b"])[0].token_ids[-1] == 2


def test_a_turn_is_cut_at_max_tokens() -> None:
    [completion] = complete([[7, 8, 9]], request(max_tokens=2))
    assert (completion.token_ids, completion.finish) == ((7, 8), Finish.LENGTH)
    assert complete([[7, 2]], request(max_tokens=2))[0].finish is Finish.STOP_ID
    assert complete([[7, 8]], request(max_tokens=2))[0].finish is Finish.LENGTH


def test_a_turn_ends_with_the_token_that_completes_a_stop_string() -> None:
    [completion] = complete(["one two three"], params=SamplingParams(stop_strings=("two",)))
    assert (TOKENIZER.decode(completion.token_ids), completion.finish) == ("one two", Finish.STOP_STRING)


def test_scripts_may_be_lists_mappings_functions_and_whole_completions() -> None:
    whole = Completion((4, 2), (-0.1, -0.2), Finish.STOP_ID)
    assert complete([whole]) == [whole]
    by_place = complete({(1, 0, 0): "a", (0, 1, 2): "b"}, request(1), request(0, 1, 2))
    assert [TOKENIZER.decode(item.token_ids[:-1]) for item in by_place] == ["a", "b"]
    [completion] = complete(lambda item: str(item.max_tokens))
    assert TOKENIZER.decode(completion.token_ids[:-1]) == "20"


def test_a_script_that_has_run_out_says_where() -> None:
    with pytest.raises(LookupError, match=r"\(prompt, sample, turn\) = \(0, 0, 1\)"):
        complete(["a"], request(turn=1))
    with pytest.raises(ValueError, match="no stop id"):
        complete(["a"], params=SamplingParams())


def test_it_remembers_what_it_was_asked() -> None:
    policy = ScriptedPolicy(["a"], tokenizer=TOKENIZER, logprob=-2.0)
    assert policy.generate([request()], PARAMS)[0].logprobs == (-2.0, -2.0)
    policy.forget()
    assert (policy.requests, policy.params, policy.forgotten) == ([[request()]], [PARAMS], 1)
