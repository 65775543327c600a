"""The cheat sheet: complete, live, and right to the digits a reader can check by hand."""

from __future__ import annotations

import importlib
import math

import pytest

from postgrad import formulas
from postgrad.formulas.sheet import SheetLine, sheet_lines

NUMBERS = {
    "mask_prompt": 2.0,
    "masked_cross_entropy": math.log(4),
    "token_logprobs": -math.log1p(math.exp(-2)),
    "entropy_from_logits": math.log(4),
    "bradley_terry_loss": math.log1p(math.exp(-0.7)),
    "dpo_loss": 0.693147,
    "implicit_reward": 0.1,
    "simpo_loss": 0.313262,
    "cpo_loss": 0.126928,
    "orpo_loss": 0.096706,
    "kto_loss": 0.5,
    "length_desensitized_sum": -5.0,
    "log_ratio": 0.3,
    "token_ratio": math.exp(0.3),
    "sequence_ratio": math.exp(0.3),
    "clipped_surrogate": -1.2,
    "two_sided_clip_surrogate": 4.0,
    "cispo_surrogate": 5.0,
    "reinforce_surrogate": 1.0,
    "soft_gate_surrogate": -2.0,
    "gamma_weight_surrogate": math.exp(-0.4 + 3 * (1 - math.exp(-0.2))),
    "clip_fractions": 0.5,
    "kl_k1": 1.5,
    "kl_k2": 1.125,
    "kl_k3": 0.296861,
    "kl_k3_importance_weighted": 2 * (math.exp(-1.5) + 0.5),
    "group_advantages": 0.5 / (math.sqrt(1 / 3) + 1e-4),
    "leave_one_out_advantages": 1.0,
    "normalize_then_sum": math.sqrt(0.5),
    "weight_positive": 0.2,
    "token_rewards": 1.975,
    "gae": 0.25,
    "whiten": math.sqrt(0.5),
    "clipped_value_loss": 1.62,
    "token_mean": 3.0,
    "sequence_mean": 3.75,
    "constant_length_mean": 0.45,
}
NAMES = [line.name for line in sheet_lines()]


def test_the_sheet_has_one_line_for_every_public_function() -> None:
    functions = {name for name in formulas.__all__ if name.islower()}
    assert set(NAMES) == functions == set(NUMBERS)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("line", sheet_lines(), ids=NAMES)
def test_each_line_computes_its_number_with_the_function_it_names(line: SheetLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.compute() == pytest.approx(NUMBERS[line.name], abs=2e-4 if "normalize" in line.name else 1e-6)
    assert line.name in line.example_call_text
    assert line.equation
    assert line.article_part
    monkeypatch.delattr(formulas, line.name)
    with pytest.raises(AttributeError, match=line.name):
        line.compute()


def test_notes_correct_what_the_articles_would_get_wrong() -> None:
    noted = {line.name for line in sheet_lines() if line.note}
    assert {"dpo_loss", "clipped_surrogate", "kl_k3", "group_advantages", "mask_prompt", "token_mean", "log_ratio"} <= noted


def test_trl_functions_exist_under_the_names_given() -> None:
    pytest.importorskip("trl")
    for path in {line.trl for line in sheet_lines() if line.trl}:
        parts = path.split(".")
        target = importlib.import_module(".".join(parts[:3]))
        for attribute in parts[3:]:
            target = getattr(target, attribute)
        assert callable(target)
