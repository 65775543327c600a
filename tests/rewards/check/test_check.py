"""`check_rewards` on rewards with one known fault each, and on rewards without any."""

import json
import math
import os

import pytest

from postgrad.rewards.check import Draft, Sample, check_rewards, say
from postgrad.rewards.check.lazy import STRATEGIES, strategies
from postgrad.rewards.check.scale import Line, _allowance
from postgrad.rewards.ledger import Scheme
from postgrad.rewards.load import load_rewards
from postgrad.sandbox import problem
from postgrad.types import Message, Prompt, ToolCall

HEAD = "import math, os, random, re, signal, time\nfrom postgrad.rewards import reward\n"


def samples(count=12, **columns):
    return [
        Sample(
            Prompt(f"d.jsonl:{i + 1}", (Message("user", f"What is {i} + {i + 7}?"),), {"answer": str(2 * i + 7), **columns}),
            say(f"It is {2 * i + 7}."),
        )
        for i in range(count)
    ]


def check(folder, source, *specs, rows=None, **settings):
    (folder / "rewards.py").write_text(HEAD + source)
    loaded = load_rewards([{"use": spec} if isinstance(spec, str) else spec for spec in specs], folder)
    return check_rewards(loaded, rows or samples(), **settings)


def ids(report, reward=None, severity=None):
    return {
        found.id
        for found in report.findings
        if (reward is None or found.reward == reward) and (severity is None or found.severity == severity)
    }


FAULTS = {
    "contract.refused": "def r(completion): return 'yes'",
    "contract.exception": "def r(completion): raise KeyError('x')",
    "contract.nan": "def r(completion): return math.nan",
    "contract.infinite": "def r(completion): return math.inf",
    "contract.abstains": "def r(completion): return None",
    "contract.range": "@reward(range=(0, 1))\ndef r(completion): return 3",
    "contract.crash": "def r(completion): os._exit(3)",
    "contract.timeout": "@reward(deadline_s=0.2)\ndef r(completion): time.sleep(60)",
    "contract.determinism": "def r(completion): return random.random()",
    "contract.batch": "def r(completions, **kw): return [len(completions)] * len(completions)",
    "contract.purity": "def r(rollout, tags): tags.append(1); return 1.0",
    "contract.order": "last = ['']\ndef r(completion):\n    value = float(completion < last[0]); last[0] = completion; return value",
}


@pytest.mark.parametrize(("id", "source"), FAULTS.items(), ids=FAULTS.keys())
def test_each_breach_of_the_contract_is_critical_and_named(tmp_path, id, source):
    report = check(tmp_path, source, "rewards.py:r", rows=samples(tags=["a"]))
    assert ids(report, "r", "critical") & {id, "contract.determinism" if id == "contract.order" else id}
    found = next(found for found in report.critical if found.reward == "r")
    assert found.rows
    assert all(row.startswith("d.jsonl:") for row in found.rows)


def test_a_group_reward_that_minds_the_order_of_its_group_is_found(tmp_path):
    report = check(tmp_path, "@reward(group=True)\ndef r(rollouts): return [float(i) for i in range(len(rollouts))]", "rewards.py:r")
    assert "contract.order" in ids(report, "r", "critical")
    report = check(tmp_path, "@reward(group=True)\ndef r(rollouts): return [float(len(r.final_answer)) for r in rollouts]", "rewards.py:r")
    assert not ids(report, severity="critical")


def test_signals_and_globals_are_no_good_in_threads(tmp_path):
    source = (
        "def alarmed(completion):\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    return float(len(completion))\n"
        "def fine(completion):\n    return float(len(completion))\n"
    )
    report = check(tmp_path, source, "rewards.py:alarmed", "rewards.py:fine")
    assert "contract.threads" in ids(report, "alarmed", "warning")
    assert "contract.threads" not in ids(report, "fine")


def test_hostile_answers_are_tried(tmp_path):
    source = (
        "def first_word(completion): return len(completion.split()[0])\n"
        "@reward(deadline_s=0.5)\ndef slow(completion):\n    time.sleep(3 if len(completion) > 10**5 else 0)\n    return 1.0\n"
        "@reward(range=(0, 50))\ndef long(completion): return float(len(completion))\n"
    )
    report = check(tmp_path, source, "rewards.py:first_word", "rewards.py:slow", "rewards.py:long")
    assert "contract.hostile.exception" in ids(report, "first_word", "warning")
    assert "contract.hostile.timeout" in ids(report, "slow", "warning")
    assert "contract.range" in ids(report, "long", "critical")


def test_a_slow_answer_within_the_rewards_own_deadline_is_no_failure(tmp_path, monkeypatch):
    """A busy machine makes slow what is not; only what training would not wait for either is named."""
    monkeypatch.setattr("postgrad.rewards.check.contract.HURRIED_S", 0.3)
    source = (
        "def busy(completion):\n    time.sleep(0.6 if len(completion) > 10**6 else 0)\n    return 1.0\n"
        "@reward(deadline_s=0.5)\ndef late(completion):\n    time.sleep(0.8 if len(completion) > 10**6 else 0)\n    return 1.0\n"
    )
    report = check(tmp_path, source, "rewards.py:busy", "rewards.py:late")
    assert "contract.hostile.timeout" not in ids(report, "busy")
    assert "contract.hostile.timeout" in ids(report, "late", "warning")


def test_a_reward_that_hangs_on_lazy_answers_does_not_hang_the_check(tmp_path):
    source = "@reward(range=(0, 1))\ndef r(completion):\n    time.sleep(60 if 'thorough' in completion else 0)\n    return 1.0\n"
    report = check(tmp_path, source, "rewards.py:r")
    assert "contract.cases.timeout" in ids(report, "r", "warning")
    assert report.seconds < 30


OUTCOME = '@reward(scope="final", claim="right", range=({}, 1), role="outcome")\ndef r(completion, answer):\n    '
HEDGE = OUTCOME.format(0) + "return float(answer in completion)\n"
STRICT = OUTCOME.format(0) + 'return float(re.findall(r"\\d+", completion) == [answer])\n'
PUNISHES = OUTCOME.format(-1) + 'return 1.0 if re.findall(r"\\d+", completion) == [answer] else -1.0\n'


def test_a_reward_that_looks_for_the_answer_anywhere_pays_for_lists(tmp_path):
    report = check(tmp_path, HEDGE, "rewards.py:r")
    assert {"lazy.list", "lazy.boxes", "lazy.contradiction"} <= ids(report, severity="critical")
    paid = next(found for found in report.findings if found.id == "lazy.list")
    assert paid.rows[0] == "d.jsonl:1"


def test_a_strict_reward_passes(tmp_path):
    report = check(tmp_path, STRICT, "rewards.py:r")
    assert not report.critical
    assert report.board[0].outcome == 1.0
    assert report.board[0].ratio == 1.0
    assert max(standing.ratio for standing in report.board[1:]) < 0.5
    assert report.matrix.moved["r"] == {
        "structure": 0.0, "reasoning": None, "tool_calls": None, "tool_results": None, "final": 1.0, "length": 0.0,
    }  # fmt: skip


def test_half_of_the_good_answer_is_a_warning(tmp_path):
    source = (
        STRICT
        + '@reward(scope="structure", claim="polite", range=(0, 1))\ndef form(completion): return float(completion.startswith("It is"))\n'
    )
    report = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:form", "weight": 1.0}, weighted=True)
    board = {standing.name: standing for standing in report.board}
    assert board["wrong"].ratio == pytest.approx(0.0)  # the disguise takes the words as well
    source = source.replace('completion.startswith("It is")', "completion.endswith('.')")
    report = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:form", "weight": 1.0}, weighted=True)
    assert "lazy.wrong" in ids(report, severity="warning")
    report = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:form", "weight": 20.0}, weighted=True)
    assert "lazy.wrong" in ids(report, severity="critical")
    report = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:form", "weight": 20.0}, weighted=False)
    assert "lazy.wrong" not in ids(report)  # without a recipe no total means anything


def test_shaping_alone_is_never_critical(tmp_path):
    report = check(
        tmp_path,
        '@reward(scope="length", claim="short", range=(-1, 0))\ndef r(rollout): return -float(rollout.sampled_tokens > 60)\n',
        "rewards.py:r",
    )
    assert not report.critical
    assert "lazy.empty" in ids(report, severity="warning")


def test_scope_is_measured(tmp_path):
    source = (
        '@reward(scope="structure", claim="tidy", range=(0, 1))\ndef liar(completion): return len(completion) % 7 / 7\n'
        '@reward(scope="final", claim="a", range=(0, 1))\ndef first(completion): return float("It" in completion)\n'
        '@reward(scope="final", claim="b", range=(0, 1))\ndef second(completion): return float("is" in completion)\n'
        '@reward(scope="reasoning", claim="c", range=(0, 1))\ndef thinks(rollout): return 1.0\n'
    )
    names = ("liar", "first", "second", "thinks")
    report = check(tmp_path, source, *(f"rewards.py:{name}" for name in names))
    outside = [found for found in report.findings if found.id == "scope.outside"]
    assert {found.reward for found in outside} == {"liar"}
    shared = next(found for found in report.findings if found.id == "scope.shared")
    assert "first and second both move when the final answer changes" in shared.message
    assert "first: a; second: b" in shared.message
    assert "scope.untested" in ids(report)


def agent_samples():
    call = ToolCall("add", {"a": 1, "b": 2})
    turns = (Message("assistant", "", (call,)), Message("tool", "3"), Message("assistant", "3"))
    return [Sample(Prompt(f"d.jsonl:{i}", (Message("user", "1 + 2?"),), {"answer": "3"}), Draft(turns)) for i in range(4)]


def test_a_failed_call_belongs_to_calls_or_results_whichever_is_declared(tmp_path):
    report = check(tmp_path, "", "tool_use", "tool_error", "numeric_match", rows=agent_samples())
    moved = report.matrix.moved
    assert moved["tool_use"]["tool_calls"] == 1.0
    assert moved["tool_use"]["tool_results"] == 0.0
    assert moved["tool_error"] == {"structure": 0, "reasoning": None, "tool_calls": 0, "tool_results": 0.5, "final": 0, "length": 0}
    assert not {found.id for found in report.findings if found.id.startswith("scope.")}


def test_a_reward_per_call_is_farmed_and_one_for_using_a_tool_only_as_far_as_it_goes(tmp_path):
    source = (
        '@reward(scope="tool_calls", claim="calls", range=(0, 100), role="outcome")\n'
        "def r(rollout): return float(len(rollout.tool_results))\n"
    )
    board = {standing.name: standing.ratio for standing in check(tmp_path, source, "rewards.py:r", rows=agent_samples()).board}
    assert board["call spam"] == 10.0
    board = {
        standing.name: standing.ratio
        for standing in check(tmp_path, "", {"use": "tool_use", "role": "outcome"}, rows=agent_samples()).board
    }
    assert board["call spam"] == 1.0


def test_shaping_that_outranks_the_outcome_is_shown_on_a_row(tmp_path):
    source = (
        STRICT
        + '@reward(scope="length", claim="short", range=(0, 1))\ndef short(rollout): return max(0.0, 1 - rollout.sampled_tokens / 20)\n'
    )
    heavy = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:short", "weight": 4.0}, weighted=True)
    assert "scale.shaping-outranks-outcome" in ids(heavy, severity="warning")
    shown = [found for found in heavy.critical if found.id == "scale.outranked"]
    assert any("(empty)" in found.message for found in shown)
    assert shown[0].rows
    light = check(tmp_path, source, "rewards.py:r", {"use": "rewards.py:short", "weight": 0.5}, weighted=True)
    assert not {"scale.outranked", "scale.shaping-outranks-outcome"} & ids(light)
    assert [(line.name, line.moves) for line in light.sheet] == [("r", 1.0), ("short", 0.5)]


def test_principle_two_is_said_where_it_applies(tmp_path):
    source = PUNISHES
    assert "scale.no-effect-penalty" in ids(check(tmp_path, source, "rewards.py:r", weighted=True, scheme=Scheme("group")), severity="info")
    assert "scale.no-effect-penalty" not in ids(check(tmp_path, source, "rewards.py:r", weighted=True, scheme=Scheme("none")))
    weighed = check(tmp_path, source, "rewards.py:r", weighted=True, scheme=Scheme("group", positive_weight=0.2))
    assert "scale.no-effect-penalty" not in ids(weighed)
    scaled = check(tmp_path, source, {"use": "rewards.py:r", "weight": 3.0}, weighted=True)
    assert "scale.no-effect-scale" in ids(scaled, severity="info")


def test_good_answers_that_earn_nothing_are_named(tmp_path):
    rows = samples()
    rows[3:9] = [Sample(sample.prompt, say("no idea")) for sample in rows[3:9]]
    report = check(tmp_path, STRICT, "rewards.py:r", rows=rows)
    found = next(found for found in report.findings if found.id == "good.unpaid")
    assert found.severity == "warning"
    assert set(found.rows) <= {f"d.jsonl:{number}" for number in range(4, 10)}


def test_async_and_turn_rewards_are_checked_like_the_others(tmp_path):
    source = (
        '@reward(scope="final", claim="a", range=(0, 1))\nasync def waits(completion): return float("It" in completion)\n'
        '@reward(scope="structure", claim="b", range=(0, 9), per_turn=True)\ndef turns(rollout): return [1.0] * rollout.turns\n'
    )
    report = check(tmp_path, source, "rewards.py:waits", "rewards.py:turns")
    assert not report.critical
    assert report.matrix.moved["waits"]["final"] == 1.0


def test_functions_run_in_the_worker_only(tmp_path):
    report = check(tmp_path, "def r(completion): return float(os.getpid())", "rewards.py:r")
    assert report.board[0].total != os.getpid()


def test_the_report_is_json_without_nan(tmp_path):
    report = check(tmp_path, HEDGE + "def none(completion): return None\n", "rewards.py:r", "rewards.py:none")
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["verdict"] == "critical"
    assert data["rewards"][0]["rows"] == 12
    assert data["scoreboard"][0]["name"] == "the good answer"
    text = "\n".join(report.lines())
    assert "critical: lazy.list" in text
    assert "    rows: d.jsonl:1" in text


def test_every_strategy_has_its_words():
    code = Sample(Prompt("r", (Message("user", "q"),), {}), say("```python\ndef f(x):\n    return x\n```"))
    tried = {name for sample in (*agent_samples()[:1], code) for lazy in strategies([sample]) for name, _ in lazy}
    assert tried == set(STRATEGIES)


def test_lazy_programs_pass_no_tests(tmp_path):
    if (found := problem()) is not None:
        pytest.skip(f"no sandbox on this machine: {found[0]}")
    good = "```python\ndef add(a, b):\n    return a + b\n```"
    rows = [Sample(Prompt(f"d.jsonl:{i}", (Message("user", "add"),), {"tests": ["assert add(1, 2) == 3"]}), say(good)) for i in range(2)]
    report = check(tmp_path, "", {"use": "code_exec"}, rows=rows)
    board = {standing.name: standing.ratio for standing in report.board}
    assert board["the good answer"] == 1.0
    assert {board["exit"], board["skipped"], board["equals"]} == {0.0}


def test_nothing_to_check_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        check_rewards([], samples())


def test_where_calls_are_the_answer_wrong_arguments_are_the_cheat_and_not_a_wrong_text(tmp_path):
    """Function-calling data: the gold calls end the rollout, and there is no text that could be wrong."""
    gold = [{"f": {"a": [n]}} for n in range(8)]
    rows = [
        Sample(
            Prompt(f"d.jsonl:{n}", (Message("user", f"f of {n}"),), {"tool_calls": [gold[n]]}),
            Draft((Message("assistant", "", (ToolCall("f", {"a": n}, id="call_0"),)),)),
        )
        for n in range(8)
    ]
    tried = dict(list(strategies(rows))[3])
    assert "wrong" not in tried
    assert tried["skeleton"].messages[0].tool_calls[0].arguments == {}
    assert [result.error for result in rows[3].good.rollout().tool_results] == [""]
    report = check(tmp_path, "", "tool_exact", {"use": "tool_match", "weight": 0.5}, rows=rows)
    assert ids(report, severity="critical") == set()


def test_nothing_is_said_to_have_been_seen_of_a_reward_that_gave_no_value(tmp_path):
    report = check(tmp_path, FAULTS["contract.exception"], "rewards.py:r")
    text = "\n".join(report.lines())
    assert "none seen" in text
    assert "… 0" not in text
    assert "scale.undeclared" not in ids(report)
    assert set(report.matrix.moved["r"].values()) == {None}
    assert report.to_json()["scale"][0]["range"] == [None, None]


def test_a_reward_that_gave_no_value_hides_nothing_of_the_others():
    def line(name, role, low, high):
        return Line(name, role, 1.0, (low, high), True, high - low)

    sheet = [line("right", "outcome", 0.0, 1.0), line("tidy", "shaping", 0.0, 0.5), line("silent", "shaping", math.nan, math.nan)]
    (found,) = _allowance(sheet)
    assert found.message.endswith("may be at most 2")
