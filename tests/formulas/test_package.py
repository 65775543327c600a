"""What holds for all formulas: torch only, nothing written in place, half precision widened, rules documented."""

from __future__ import annotations

import ast
import doctest
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from postgrad import formulas as f

FOLDER = Path(inspect.getfile(f)).parent
PUBLIC = {name: getattr(f, name) for name in f.__all__ if name.islower()}
ROW = torch.tensor([[-1.0, -0.5, -2.0], [-0.25, -1.5, -0.75]])
PER_ROW = torch.tensor([1.0, -0.5])
MASK = torch.tensor([[True, True, False], [True, True, True]])

CALLS: dict[str, Callable[..., object]] = {
    "bradley_terry_loss": lambda a, b, _: f.bradley_terry_loss(a[0], b[0], b[1]),
    "cispo_surrogate": lambda a, b, v: f.cispo_surrogate(-a, v, b, MASK),
    "clip_fractions": lambda a, _, v: f.clip_fractions(-a, v, MASK),
    "clipped_surrogate": lambda a, _, v: f.clipped_surrogate(-a, v),
    "clipped_value_loss": lambda a, b, _: f.clipped_value_loss(a, b, -b, MASK, clip=0.2),
    "constant_length_mean": lambda a, *_: f.constant_length_mean(a, MASK, 3),
    "cpo_loss": lambda a, b, _: f.cpo_loss(a[0], b[0]),
    "dpo_loss": lambda a, b, _: f.dpo_loss(a[0], a[1], b[0], b[1], beta=0.1),
    "entropy_from_logits": lambda a, *_: f.entropy_from_logits(a),
    "gae": lambda a, b, v: f.gae(a, b, MASK, gamma=0.9, lam=0.9, bootstrap=v)[0],
    "gamma_weight_surrogate": lambda a, b, v: f.gamma_weight_surrogate(a, v, b, MASK),
    "group_advantages": lambda a, *_: f.group_advantages(a.flatten(), 3),
    "implicit_reward": lambda a, b, _: f.implicit_reward(a, b, beta=0.1),
    "kl_k1": lambda a, b, _: f.kl_k1(a, b, MASK),
    "kl_k2": lambda a, b, _: f.kl_k2(a, b, MASK),
    "kl_k3": lambda a, b, _: f.kl_k3(a, b, MASK),
    "kl_k3_importance_weighted": lambda a, b, _: f.kl_k3_importance_weighted(a, b, -a, MASK),
    "kto_loss": lambda a, b, _: f.kto_loss(a[0], b[0], MASK[0], a[1].mean()),
    "leave_one_out_advantages": lambda a, *_: f.leave_one_out_advantages(a.flatten(), 3),
    "length_desensitized_sum": lambda a, *_: f.length_desensitized_sum(a, MASK, torch.tensor([1, 2]), alpha=0.5),
    "log_ratio": lambda a, b, _: f.log_ratio(a, b, MASK),
    "masked_cross_entropy": lambda a, *_: f.masked_cross_entropy(a[None], torch.tensor([[0, 1]])),
    "normalize_then_sum": lambda a, _, v: f.normalize_then_sum(a, v, 3),
    "orpo_loss": lambda a, b, _: f.orpo_loss(a[0], b[0], torch.tensor([1, 2, 3]), torch.tensor([2, 2, 1])),
    "reinforce_surrogate": lambda a, _, v: f.reinforce_surrogate(a, v, MASK),
    "sequence_mean": lambda a, *_: f.sequence_mean(a, MASK),
    "sequence_ratio": lambda a, *_: f.sequence_ratio(a, MASK),
    "simpo_loss": lambda a, b, _: f.simpo_loss(a[0], b[0], torch.tensor([1, 2, 3]), torch.tensor([2, 2, 1])),
    "soft_gate_surrogate": lambda a, _, v: f.soft_gate_surrogate(-a, v),
    "token_logprobs": lambda a, *_: f.token_logprobs(a, torch.tensor([0, 2])),
    "token_mean": lambda a, *_: f.token_mean(a, MASK),
    "token_ratio": lambda a, *_: f.token_ratio(a),
    "token_rewards": lambda a, _, v: f.token_rewards(v, MASK, a, kl_coef=0.1),
    "two_sided_clip_surrogate": lambda a, _, v: f.two_sided_clip_surrogate(-a, v),
    "weight_positive": lambda a, *_: f.weight_positive(-a, positive_weight=0.1),
    "whiten": lambda a, *_: f.whiten(a, MASK),
}


def _tensors(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def test_every_formula_takes_part_in_these_tests() -> None:
    assert set(CALLS) == set(PUBLIC) - {"mask_prompt"}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_fp32_result_in_fp32(name: str, dtype: torch.dtype) -> None:
    half = [x.to(dtype) for x in (ROW, 1.25 * ROW, PER_ROW)]
    for ours, wide in zip(_tensors(CALLS[name](*half)), _tensors(CALLS[name](*(x.float() for x in half))), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wide, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_double_stays_double(name: str) -> None:
    double = [x.double() for x in (ROW, 1.25 * ROW, PER_ROW)]
    if name != "clip_fractions":  # fractions are counts
        assert all(x.dtype == torch.float64 for x in _tensors(CALLS[name](*double)))


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_left_as_they_were(name: str) -> None:
    inputs = [ROW.clone(), 1.25 * ROW, PER_ROW.clone()]
    before, versions = [x.clone() for x in inputs], [x._version for x in inputs]
    CALLS[name](*inputs)
    assert [x._version for x in inputs] == versions
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_an_equation_edge_cases_a_number_and_a_source(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert doctest.DocTestParser().get_examples(text), "no doctest"
    assert "Source:" in text
    assert "edge cases" in text.lower()
    assert "\n    " in text, "no equation"


def _imports(file: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


def test_formulas_import_torch_and_the_standard_library_only() -> None:
    for file in FOLDER.glob("*.py"):
        for name in _imports(file):
            ours = name == "postgrad" or name.startswith("postgrad.formulas")
            assert ours or name.split(".")[0] in {"torch", *sys.stdlib_module_names}, f"{file.name} imports {name}"


def test_nothing_is_written_in_place() -> None:
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            written = [node.target] if isinstance(node, ast.AugAssign) else node.targets if isinstance(node, ast.Assign) else []
            assert not any(isinstance(target, ast.Subscript) for target in written), f"{file.name}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                assert not (name.endswith("_") and not name.startswith("_")), f"{file.name}:{node.lineno} calls {name}"


def test_non_finite_error_is_a_value_error() -> None:
    assert issubclass(f.NonFiniteError, ValueError)
