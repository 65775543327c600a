"""postgrad's side on a tiny model: every job of the benchmark steps, and forced samples are what its comparison says they are."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from benchmarks import workloads
from benchmarks.ours import JOBS, ForcedSampler, Run, forcing
from postgrad.chat import ChatFormat
from postgrad.protocols import Finish, SampleKey, SamplingParams, TurnRequest
from postgrad.rollout.tools import make_toolbox
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.testing.tiny import tiny_model

TURNS = 3


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chat():
    return ChatFormat(tiny_tokenizer(), stop_ids=frozenset({2}))


def request(turn, sample=0):
    return TurnRequest(SampleKey(0, 1, 0, sample), turn, (1, 5), 4)


def answers(sampler, requests):
    with sampler.stream(SamplingParams(stop_ids=frozenset({2}))) as stream:
        stream.submit(requests)
        found = {}
        while stream.busy:
            found |= {(asked.turn, asked.key.sample): turn for asked, turn in stream.step()}
    return found


def test_a_turn_is_not_ended_by_the_model_itself(chat):
    policy = ScriptedPolicy([[7, 2, 8, 9]])
    (turn,) = answers(ForcedSampler(policy, chat, forcing(1, 40), 2), [request(0)]).values()
    assert turn.token_ids == (7, 2, 8, 9)
    assert turn.finish is Finish.LENGTH


def test_the_first_turns_of_an_agent_become_calls_after_they_were_sampled(chat):
    policy = ScriptedPolicy([[7, 7, 7, 7]] * TURNS)
    found = answers(ForcedSampler(policy, chat, forcing(TURNS, 40), 2), [request(turn, sample=turn) for turn in range(TURNS)])
    call = (*chat.raw_prompt_ids(workloads.CALL), 2)
    assert [found[turn, turn].token_ids for turn in range(TURNS)] == [call, call, (7, 7, 7, 7)]
    assert sum(map(len, policy.requests)) == TURNS


def test_a_check_samples_nothing_and_says_the_forced_text(chat):
    policy = ScriptedPolicy([])
    sampler = ForcedSampler(policy, chat, forcing(1, 40), 2)
    sampler.check = True
    found = answers(sampler, [request(0, sample=3)])
    assert found[0, 3].token_ids == (*chat.raw_prompt_ids(workloads.forced_text(3, 40)), 2)
    assert policy.requests == []


def test_trl_shows_its_model_the_tool_as_postgrad_shows_it():
    (spec,) = make_toolbox([workloads.multiply]).specs
    shown = workloads.MULTIPLY["function"]
    assert (spec.name, spec.description) == (shown["name"], shown["description"])
    assert json.dumps(spec.parameters) == json.dumps(shown["parameters"])  # with the order of the keys, which is printed


@pytest.mark.parametrize("name", JOBS)
def test_every_job_steps_and_trains(name, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    job = JOBS[name]
    changes = {"model": tiny_folder, "data": job.recipe["data"] | {"max_length": 4096}}  # the tiny tokenizer has more tokens for a word
    if job.forced is not None:
        turns = workloads.AGENT_TURNS if name == "agent" else 1
        changes["rollout"] = {"group_size": workloads.GROUP, "max_tokens": 1024, "max_turns": turns}
        job = replace(job, forced=forcing(turns, 40))
    if name == "agent":
        changes["chat_template"] = "qwen"
    with ExitStack() as stack:
        run = Run(job, stack, **changes)
        metrics = run.step(1, check=True)
        assert metrics["grad_norm"] > 0
        rows = {"sft": 8, "startup": 1, "grpo": 16, "agent": 16, "decoding": 16}.get(name, 8)
        assert len(run.rows) == rows
        assert run.loaded_mib > 0
        if name == "agent":
            assert metrics["tools/call_frequency"] == TURNS - 1
