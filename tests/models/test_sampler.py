"""The in-process sampler against plain forward calls of transformers, and a sample's independence of its batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from postgrad.errors import ModelError, RecipeError, RunError
from postgrad.models.decode import CacheDecoder
from postgrad.models.dtype import bf16_supported
from postgrad.models.sampler import LocalSampler
from postgrad.models.serving import Serving
from postgrad.protocols import Completion, Finish, SampleKey, Sampler, SamplingParams, TurnRequest
from postgrad.testing.tiny import ARCHITECTURES, Architecture, tiny_model, tiny_tokenizer

STOPS = frozenset({7, 9, 11, 13, 200})
TOKENIZER = tiny_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids))


def sampler_of(model: nn.Module, **options: object) -> LocalSampler:
    return LocalSampler(model, decode=decode, **options)  # type: ignore[arg-type]


MODEL = tiny_model("qwen2")
PARAMS = SamplingParams(temperature=1.2, top_k=50, stop_ids=STOPS)


@cache
def batch() -> tuple[list[TurnRequest], list[Completion]]:
    """15 rollouts of 5 prompts, and what MODEL answers when they are asked for together."""
    requests = first_turns(prompts=5, group=3, max_tokens=12)
    return requests, sampler_of(MODEL).generate(requests, PARAMS)


def words(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randrange(14, 199) for _ in range(count))


def first_turns(*, prompts: int, group: int, max_tokens: int = 16, seed: int = 0, longest: int = 40) -> list[TurnRequest]:
    generator = random.Random(seed)
    contexts = [words(generator, generator.randrange(1, longest)) for _ in range(prompts)]
    return [TurnRequest(SampleKey(0, 0, p, g), 0, contexts[p], max_tokens) for p in range(prompts) for g in range(group)]


def next_turns(requests: Sequence[TurnRequest], answers: Sequence[Completion], seed: int = 1) -> list[TurnRequest]:
    """Each rollout goes on behind a tool result of its own length."""
    generator = random.Random(seed)
    return [
        TurnRequest(r.key, r.turn + 1, r.context + a.token_ids + words(generator, generator.randrange(1, 20)), r.max_tokens)
        for r, a in zip(requests, answers, strict=True)
    ]


def forward_logprobs(model: nn.Module, request: TurnRequest, answer: Completion, temperature: float) -> torch.Tensor:
    """Log-softmax rows [tokens, V] of a plain forward call at the positions that were sampled."""
    ids = torch.tensor([request.context + answer.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    return (logits / temperature).log_softmax(-1)[len(request.context) - 1 : -1]


def assert_logprobs_are_the_models(
    model: nn.Module, requests: Sequence[TurnRequest], answers: Sequence[Completion], temperature: float
) -> None:
    for request, answer in zip(requests, answers, strict=True):
        rows = forward_logprobs(model, request, answer, temperature)
        expected = rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def assert_same_samples(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    """The same tokens and endings, log-probs up to rounding (other processors may round with the batch)."""
    assert [(a.token_ids, a.finish) for a in left] == [(a.token_ids, a.finish) for a in right]
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=2e-5, rtol=0)


def test_it_is_a_sampler() -> None:
    sampler: Sampler = sampler_of(tiny_model())
    assert sampler.generate([], SamplingParams()) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_of_three_turns_equal_a_plain_forward_call(architecture: Architecture, temperature: float) -> None:
    model = tiny_model(architecture)
    sampler = sampler_of(model)
    params = SamplingParams(temperature=temperature, stop_ids=STOPS)
    requests = first_turns(prompts=3, group=3)
    for _ in range(3):
        answers = sampler.generate(requests, params)
        assert_logprobs_are_the_models(model, requests, answers, temperature)
        requests = next_turns(requests, answers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate(architecture: Architecture) -> None:
    model = tiny_model(architecture)
    requests = first_turns(prompts=3, group=1, max_tokens=20)
    answers = sampler_of(model).generate(requests, SamplingParams(temperature=0.0, stop_ids=STOPS))
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([request.context])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=sorted(STOPS))
        assert answer.token_ids == tuple(whole[0, len(request.context) :].tolist())
    assert_logprobs_are_the_models(model, requests, answers, 1.0)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_a_sample_alone_is_the_sample_in_a_batch(architecture: Architecture, dtype: torch.dtype | None) -> None:
    """Over two turns. In bf16 any rounding that depended on the batch would change tokens within a few steps."""
    if dtype is torch.bfloat16 and not bf16_supported(torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 arithmetic")
    model = tiny_model(architecture)
    sampler = sampler_of(model, dtype=dtype)
    params = SamplingParams(stop_ids=STOPS)
    requests = first_turns(prompts=4, group=4, max_tokens=24, longest=80)
    answers = sampler.generate(requests, params)
    later = next_turns(requests, answers)
    later_answers = sampler.generate(later, params)
    for index in (0, 5, 10, 15):
        alone = sampler_of(model, dtype=dtype)
        assert_same_samples(alone.generate([requests[index]], params), [answers[index]])
        assert_same_samples(alone.generate([later[index]], params), [later_answers[index]])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_sample_does_not_depend_on_which_others_are_asked_for_nor_in_which_order(data: st.DataObject) -> None:
    requests, answers = batch()
    chosen = data.draw(st.lists(st.sampled_from(range(len(requests))), min_size=1, unique=True))
    sampler = sampler_of(MODEL, max_batch=data.draw(st.sampled_from([1, 3, 64])))
    assert_same_samples(sampler.generate([requests[index] for index in chosen], PARAMS), [answers[index] for index in chosen])


def test_seed_step_prompt_sample_and_turn_each_change_the_sample() -> None:
    context = (50, 60, 70)
    keys = [(SampleKey(0, 0, 0, 0), 0), (SampleKey(1, 0, 0, 0), 0), (SampleKey(0, 1, 0, 0), 0), (SampleKey(0, 0, 1, 0), 0)]
    keys += [(SampleKey(0, 0, 0, 1), 0), (SampleKey(0, 0, 0, 0), 1)]
    sampler = sampler_of(tiny_model())
    texts = {sampler.generate([TurnRequest(key, turn, context, 12)], SamplingParams())[0].token_ids for key, turn in keys}
    assert len(texts) == len(keys)


def test_answers_are_in_request_order_whatever_finishes_first() -> None:
    requests = first_turns(prompts=4, group=2)
    answers = sampler_of(MODEL).generate(requests, PARAMS)
    backwards = sampler_of(MODEL).generate(requests[::-1], PARAMS)
    assert_same_samples(backwards, answers[::-1])
    assert len({len(answer.token_ids) for answer in answers}) > 1


def test_every_request_has_its_own_limit_and_none_is_exceeded() -> None:
    requests = [TurnRequest(SampleKey(0, 0, 0, g), 0, (5, 6), limit) for g, limit in enumerate((0, 1, 2, 9))]
    answers = sampler_of(tiny_model()).generate(requests, SamplingParams())
    assert [len(answer.token_ids) for answer in answers] == [0, 1, 2, 9]
    assert {answer.finish for answer in answers} == {Finish.LENGTH}


def test_the_sampled_end_token_is_kept_with_its_logprob() -> None:
    requests = first_turns(prompts=1, group=40, max_tokens=60)
    model = tiny_model()
    answers = sampler_of(model).generate(requests, SamplingParams(stop_ids=STOPS))
    ended = [answer for answer in answers if answer.finish is Finish.STOP_ID]
    assert {answer.token_ids[-1] for answer in ended} == STOPS  # every one of several end ids is honoured
    assert all(not STOPS & set(answer.token_ids[:-1]) for answer in answers)
    assert all(len(answer.token_ids) == len(answer.logprobs) for answer in answers)
    assert_logprobs_are_the_models(model, requests, answers, 1.0)


def test_a_stop_string_ends_the_turn() -> None:
    (request,) = first_turns(prompts=1, group=1, max_tokens=30)
    free = sampler_of(MODEL).generate([request], SamplingParams())[0]
    text = decode(free.token_ids[8:11])
    stopped = sampler_of(MODEL).generate([request], SamplingParams(stop_strings=(text,)))[0]
    assert stopped.finish is Finish.STOP_STRING
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert text in decode(stopped.token_ids)
    assert text not in decode(stopped.token_ids[:-1])


def test_a_context_that_leaves_no_room_is_refused_before_anything_is_sampled() -> None:
    steps: list[int] = []
    sampler = sampler_of(tiny_model(max_position_embeddings=32), progress=lambda done, live: steps.append(done))
    good, long = TurnRequest(SampleKey(0, 0, 0, 0), 0, (5,), 4), TurnRequest(SampleKey(0, 3, 1, 2), 1, (5,) * 32, 4)
    with pytest.raises(RunError, match=r"step 3, prompt 1, sample 2, turn 1.*32 tokens"):
        sampler.generate([good, long], SamplingParams())
    assert steps == []


def test_a_model_that_keeps_no_cache_is_refused() -> None:
    class Forgetful(LlamaForCausalLM):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return input_ids

    with pytest.raises(ModelError, match="Forgetful keeps no cache"):
        CacheDecoder(Serving.live(Forgetful(tiny_model().config)))


def test_a_turn_that_reaches_the_models_last_position_ends_by_length() -> None:
    sampler = sampler_of(tiny_model("gpt2", n_positions=32))
    answer = sampler.generate([TurnRequest(SampleKey(0, 0, 0, 0), 0, (5,) * 30, 100)], SamplingParams())[0]
    assert (len(answer.token_ids), answer.finish) == (2, Finish.LENGTH)


@pytest.mark.parametrize(
    "request_",
    [
        TurnRequest(SampleKey(0, 0, 0, 0), 0, (), 4),
        TurnRequest(SampleKey(0, 0, 0, 0), 0, (5,), -1),
        TurnRequest(SampleKey(0, 0, 0, 0), 0, (5, 288), 4),
        TurnRequest(SampleKey(0, 0, 0, 0), 0, (5, -1), 4),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(request_: TurnRequest) -> None:
    with pytest.raises(RunError, match="step 0, prompt 0, sample 0"):
        sampler_of(MODEL).generate([request_], SamplingParams())


def test_two_requests_with_one_key_are_refused() -> None:
    request = TurnRequest(SampleKey(0, 0, 0, 0), 0, (5,), 4)
    with pytest.raises(RunError, match="same noise"):
        sampler_of(MODEL).generate([request, request], SamplingParams())


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(RecipeError, match="top_p"):
        sampler_of(MODEL).generate(first_turns(prompts=1, group=1), SamplingParams(top_p=0.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_stop_the_run_and_name_the_sample(temperature: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[42] = float("nan")  # tied: poisons one logit of every row
    with pytest.raises(RunError, match=r"step 0, prompt 0, sample 0, turn 0: the logits of token 0 are not finite"):
        sampler_of(model).generate([TurnRequest(SampleKey(0, 0, 0, 0), 0, (5, 6), 4)], SamplingParams(temperature=temperature))


def test_after_an_error_the_sampler_works_as_before() -> None:
    requests, answers = batch()
    sampler = sampler_of(MODEL)

    def stop(done: int, live: int) -> None:
        raise KeyboardInterrupt

    sampler.progress = stop
    with pytest.raises(KeyboardInterrupt):
        sampler.generate(requests, PARAMS)
    sampler.progress = None
    assert_same_samples(sampler.generate(requests, PARAMS), answers)


def test_progress_counts_tokens_and_rows_that_are_still_going() -> None:
    seen: list[tuple[int, int]] = []
    sampler = sampler_of(MODEL, progress=lambda done, live: seen.append((done, live)))
    requests, answers = batch()
    sampler.generate(requests, PARAMS)
    assert seen[-1] == (sum(len(answer.token_ids) for answer in answers), 0)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert max(live for _, live in seen) <= len(requests)


def test_the_model_is_left_as_it_was_found() -> None:
    model = tiny_model(dropout=0.5).train()
    model.lm_head.eval()
    before = {name: part.training for name, part in model.named_modules()}
    implementation = model.config._attn_implementation
    answers = sampler_of(model).generate(batch()[0], PARAMS)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    assert answers == sampler_of(tiny_model()).generate(batch()[0], PARAMS)  # dropout was off while sampling
    loss = model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    loss.backward()  # nothing of the sampler's lingers in the graph


def test_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    first = sampler_of(MODEL).generate(batch()[0], PARAMS)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert sampler_of(MODEL).generate(batch()[0], PARAMS) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_with_a_sliding_window_is_sampled_exactly_too() -> None:
    """The flat decoder refuses it; the fallback must answer the same questions."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=6, initializer_range=0.2, pad_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    sampler = sampler_of(model)
    assert sampler.refusal is not None
    assert "window" in sampler.refusal
    requests = first_turns(prompts=3, group=2)
    for _ in range(2):
        answers = sampler.generate(requests, SamplingParams(temperature=0.8, stop_ids=STOPS))
        assert_logprobs_are_the_models(model, requests, answers, 0.8)
        alone = sampler_of(model).generate([requests[3]], SamplingParams(temperature=0.8, stop_ids=STOPS))
        assert_same_samples(alone, [answers[3]])
        requests = next_turns(requests, answers)
    assert len(sampler_of(model, dtype=torch.bfloat16).generate(requests, SamplingParams())) == len(requests)


def test_keys_and_values_may_have_other_widths_and_devices_without_a_kernel_take_the_plain_formula() -> None:
    from postgrad.models.kv import attend_part, attend_part_plainly, causal_mask, merge

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 16, generator=generator) for length in (7, 9, 9))
    mask = causal_mask(7, 9, query, before=2)
    fast, plain = attend_part(query, key, value, scaling=0.3, mask=mask), attend_part_plainly(query, key, value, scaling=0.3, mask=mask)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    halves = [attend_part_plainly(query, key[:, :, part], value[:, :, part], scaling=0.3, mask=None) for part in (slice(0, 4), slice(4, 9))]
    whole, _ = attend_part_plainly(query, key, value, scaling=0.3, mask=None)
    torch.testing.assert_close(merge(*halves), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_real_model_answers_sensibly(dtype: torch.dtype | None) -> None:
    from postgrad.models.loading import load

    loaded = load("smollm2-135m")
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    context = tuple(loaded.tokenizer.encode(text, add_special_tokens=False))
    sampler = LocalSampler(loaded.model, decode=loaded.tokenizer.decode, dtype=dtype)
    params = SamplingParams(temperature=0.0, stop_ids=loaded.stop_ids)
    answer = sampler.generate([TurnRequest(SampleKey(0, 0, 0, 0), 0, context, 40)], params)[0]
    assert "Paris" in loaded.tokenizer.decode(list(answer.token_ids))
    assert answer.finish is Finish.STOP_ID
