"""The RLHF chapter's data and its annotator: balanced, disjoint, and a rule that is not length."""

from __future__ import annotations

import json
from statistics import mean
from types import SimpleNamespace

import pytest

from postgrad.demo import annotator, rlhf
from postgrad.demo.preferences import COURTEOUS, CURT


def judged(text: str) -> float:
    return annotator.courteous(SimpleNamespace(final_answer=text))


@pytest.mark.parametrize("kind", ["train", "heldout"])
def test_the_annotator_knows_every_phrase_alone(kind):
    assert [judged(phrase.format("It is open.")) for phrase in COURTEOUS[kind]] == [1.0] * 4
    assert [judged(phrase.format("It is open.")) for phrase in CURT[kind]] == [0.0] * 4


def test_every_half_of_a_curt_phrase_spoils_a_courteous_answer():
    for tone, expected in ((CURT, 0.0), (COURTEOUS, 1.0)):
        for phrase in (*tone["train"], *tone["heldout"]):
            for half in phrase.split(" {} "):
                assert judged(f"Thank you for asking! It is open. {half}") == expected, half


def test_an_answer_of_neither_kind_is_not_courteous():
    assert judged("It is open.") == judged("") == 0.0


def test_the_sentence_is_looked_for_as_it_was_given():
    assert annotator.informative(SimpleNamespace(final_answer="Sure. It costs 8 dollars. Bye."), "It costs 8 dollars.") == 1.0
    assert annotator.informative(SimpleNamespace(final_answer="Sure. It costs 18 dollars."), "It costs 8 dollars.") == 0.0


def test_demonstrations_are_half_and_half_of_about_equal_length_and_independent_of_the_wording():
    answers = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rlhf.demonstrations(0, 240)]
    kind = {1.0: [], 0.0: []}
    for question, answer in answers:
        kind[judged(answer)].append((question, answer))
    assert len(kind[1.0]) == len(kind[0.0]) == 120
    lengths = [mean(len(answer.split()) for _, answer in rows) for rows in kind.values()]
    assert abs(lengths[0] - lengths[1]) < 1.0
    for start in ("When does", "Where is", "How much", "Who can", "How do I", "Is there"):
        share = mean(judged(answer) for question, answer in answers if f"Question: {start}" in question)
        assert 0.25 < share < 0.75, start


def test_held_out_questions_share_no_subject_with_the_trained_ones():
    trained, heldout = rlhf.prompts(0, "train", 240), rlhf.prompts(0, "heldout", 120)
    assert len({row["question"] + row["fact"] for row in trained}) == 240
    assert len({row["question"] + row["fact"] for row in heldout}) == 120
    for kind in ("place", "thing", "where"):
        assert not set(rlhf.WORDS["train"][kind]) & set(rlhf.WORDS["heldout"][kind])
    assert not any(word in row["question"] for row in heldout for word in rlhf.WORDS["train"]["place"] + rlhf.WORDS["train"]["thing"])


def test_the_seed_decides_every_byte(tmp_path):
    files = [{path.name: path.read_bytes() for path in rlhf.write(tmp_path / name, seed)} for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert files[0] == files[1]
    assert [name for name in files[0] if files[0][name] == files[2][name]] == ["annotator.py"]
    rows = [json.loads(line) for line in files[0]["heldout.jsonl"].splitlines()]
    assert {tuple(row) for row in rows} == {("prompt", "question", "fact")}
