"""Recipes: what is refused, and that each refusal names the key, the line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from postgrad.errors import RecipeError
from postgrad.train.recipe import GRPORecipe, Pipeline, SFTRecipe
from postgrad.train.recipe_file import LoadedRecipe, load_recipe, parse_recipe

SFT = """\
method: sft
model: smollm2-135m
run_dir: runs/x
max_steps: 3
data: {train: rows.jsonl}
optimizer:
  learning_rate: 1e-5
  warmup_steps: 1
"""
GRPO = """\
method: grpo
model: smollm2-135m
run_dir: runs/x
max_steps: 3
data:
  train: rows.jsonl
rollout:
  group_size: 4
rewards:
  - {use: "rewards.py:correct"}
"""


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value


def test_scientific_notation_without_a_dot_is_a_number(recipe):
    loaded = load_recipe(recipe(SFT))
    assert isinstance(loaded.recipe, SFTRecipe)
    assert loaded.recipe.optimizer.learning_rate == 1e-5


def test_unknown_key_is_named_with_its_line_and_the_nearest_key(recipe):
    error = refusal(recipe(SFT.replace("warmup_steps", "warmup_stepss")))
    assert error.where is not None
    assert error.where.endswith("recipe.yaml:8")
    assert "optimizer.warmup_stepss" in error.what
    assert error.hint == "did you mean warmup_steps?"
    assert error.exit_code == 2


def test_key_in_the_wrong_section_names_the_right_one(recipe):
    assert refusal(recipe(SFT + "learning_rate: 1e-5\n")).hint == "it belongs to optimizer.learning_rate"


def test_key_of_another_method_is_refused(recipe):
    assert "rollout" in refusal(recipe(SFT + "rollout: {group_size: 4}\n")).what


@pytest.mark.parametrize("value", ["fast", "-1", ".nan", ".inf", "0"])
def test_learning_rate_that_is_no_positive_number_is_refused(recipe, value):
    error = refusal(recipe(SFT), f"optimizer.learning_rate={value}")
    assert "optimizer.learning_rate" in error.what


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.group_size=1", "rollout.group_size"),
        ("loss={clip_low: 1.0}", "loss.clip_low"),
        ("loss={kl_coef: -0.1}", "loss.kl_coef"),
        ("batch={prompts: 8, minibatches: 3}", "batch.minibatches"),
        ("epochs=1", "max_steps"),
        ("rollout={top_p: 0.9}", "loss.old_logprobs"),
        ("rollout={refill: 2}", "rollout.refill"),
        ("loss={constant_length: 64}", "loss.constant_length"),
        ("loss={preset: cispo, max_ratio: 3}", "loss.max_ratio"),
        ("loss={preset: rloo, clip_high: 0.3}", "loss.clip_high"),
        ("loss={normalize: normalize_then_sum, scale: none}", "loss.scale"),
        ("rewards=[]", "rewards"),
        ("rollout.temperature=0", "rollout.temperature"),
    ],
)
def test_impossible_combinations_are_refused_at_their_key(recipe, override, key):
    assert refusal(recipe(GRPO), override).what.startswith(key)


def test_divisors_are_listed_when_minibatches_do_not_divide_prompts(recipe):
    assert "[1, 2, 4, 8]" in refusal(recipe(GRPO), "batch={prompts: 8, minibatches: 3}").what


def test_top_p_is_allowed_when_the_ratio_does_not_use_the_sampler(recipe):
    loaded = load_recipe(recipe(GRPO), ["rollout.top_p=0.9", "loss={old_logprobs: policy}"])
    assert isinstance(loaded.recipe, GRPORecipe)


def test_neither_steps_nor_epochs_is_refused(recipe):
    assert "exactly one" in refusal(recipe(SFT.replace("max_steps: 3\n", ""))).what


def test_duplicate_key_is_refused_not_overwritten(recipe):
    error = refusal(recipe(SFT + "max_steps: 9\n"))
    assert "stands twice" in error.what
    assert "line 4" in error.what


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n"])
def test_file_that_is_no_mapping_is_refused(recipe, text):
    assert "mapping" in refusal(recipe(text)).what


@pytest.mark.parametrize("text", ["method: sft\n\tmodel: x\n", "method: 'sft\n", "a: b: c\n"])
def test_broken_yaml_names_line_and_column(recipe, text):
    error = refusal(recipe(text))
    assert error.where is not None
    assert error.where.count(":") >= 2


def test_python_tag_constructs_nothing(recipe, tmp_path):
    target = tmp_path / "made"
    error = refusal(recipe(f"method: !!python/object/apply:os.mkdir [{target}]\n"))
    assert "not allowed" in error.what
    assert not target.exists()


def test_unknown_method_suggests_the_nearest(recipe):
    assert refusal(recipe(SFT), "method=sfft").hint == "did you mean sft?"


def test_override_of_unknown_path_is_refused(recipe):
    assert "grpo" in refusal(recipe(SFT), "grpo.x=1").what


@pytest.mark.parametrize("override", ["max_steps", "=3", "method.x=1", "max_steps=[1"])
def test_malformed_override_is_refused(recipe, override):
    refusal(recipe(SFT), override)


@pytest.mark.parametrize("override", ["rewards.x.weight=1", "rewards.7.weight=1", "rewards.-1.weight=1"])
def test_override_of_a_list_item_that_is_not_there_is_refused(recipe, override):
    refusal(recipe(GRPO), override)


def test_override_reaches_list_items(recipe):
    loaded = load_recipe(recipe(GRPO), ["rewards.0.weight=0.5"])
    assert isinstance(loaded.recipe, GRPORecipe)
    assert loaded.recipe.rewards[0].weight == 0.5


def test_missing_file_is_a_recipe_error(tmp_path):
    error = refusal(tmp_path / "no.yaml")
    assert (error.what, error.hint) == ("the recipe cannot be read: no such file or directory", "pass the path of a YAML file")
    (tmp_path / "recipe.yaml").touch()
    assert refusal(tmp_path / "recipes.yaml").hint == f"did you mean {tmp_path / 'recipe.yaml'}?"


def _stages(second_model: str) -> str:
    def indent(text: str) -> str:
        return "".join("    " + line + "\n" for line in text.splitlines() if not line.startswith("run_dir"))

    return "run_dir: runs/pipe\nseed: 7\nstages:\n  warm:\n" + indent(SFT) + "  rl:\n" + indent(GRPO.replace("smollm2-135m", second_model))


def test_pipeline_stages_inherit_run_dir_and_seed(recipe):
    loaded = load_recipe(recipe(_stages("stage:warm")))
    assert isinstance(loaded.recipe, Pipeline)
    assert loaded.recipe.stages["rl"].run_dir == "runs/pipe/rl"
    assert loaded.recipe.stages["rl"].seed == 7


@pytest.mark.parametrize("model", ["stage:rl", "stage:nobody"])
def test_pipeline_stage_may_only_use_an_earlier_stage(recipe, model):
    error = refusal(recipe(_stages(model)))
    assert "no earlier stage" in error.what
    assert "warm" in error.what


def test_error_inside_a_stage_names_its_line(recipe):
    text = _stages("stage:warm").replace("group_size", "group_sise")
    error = refusal(recipe(text))
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "group_sise" in row)
    assert error.where is not None
    assert error.where.endswith(f":{line}")
    assert error.hint == "did you mean group_size?"


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("rewards[0]", ":10"),
        ("rewards[0].use", ":10"),
        ("rewards[1]", ":9"),  # there is no such item: the line of the list
        ("data.train", ":6"),
        ("data.columns", ":5"),  # the nearest that stands in the file
        ("data.columns.prompt", ":5"),
        ("max_steps", ":4"),
        ("batch.prompts", ""),  # nothing of it stands there
    ],
)
def test_what_is_found_wrong_later_has_its_line_too(recipe, key, line):
    path = recipe(GRPO)
    with pytest.raises(RecipeError) as caught, load_recipe(path).placing(()):
        raise RecipeError("is wrong", key=key, where="rewards.py:8")
    assert str(caught.value) == f"{path}{line}: {key}: rewards.py:8: is wrong"


def test_what_no_key_asks_for_gets_no_line(recipe):
    with pytest.raises(RecipeError) as caught, load_recipe(recipe(GRPO)).placing(()):
        raise RecipeError("is wrong", where="data.json")
    assert str(caught.value) == "data.json: is wrong"


def test_what_is_found_wrong_later_in_a_stage_has_the_line_of_that_stage(recipe):
    text = _stages("stage:warm")
    path = recipe(text)
    line = max(number for number, row in enumerate(text.splitlines(), 1) if "train: rows.jsonl" in row)
    with pytest.raises(RecipeError) as caught, load_recipe(path).placing(("stages", "rl")):
        raise RecipeError("is wrong", key="data.train")
    assert caught.value.place == f"{path}:{line}: stages.rl.data.train"


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        ("{train: a.jsonl, columns: {promt: q}}", "data.columns", "unknown field 'promt'; did you mean prompt?"),
        ("{train: [a.jsonl, {file: b.jsonl, columns: {chosen: x}}]}", "data.train.1", "a pair needs both sides; map chosen and rejected"),
        ("{train: a.jsonl, columns: {prompt: 3}}", "data.columns", "prompt takes a column name or a list of them; e.g. {prompt: question}"),
    ],
)
def test_a_map_that_means_nothing_is_refused_where_it_stands(recipe, data, key, message):
    path = recipe(SFT.replace("{train: rows.jsonl}", data))
    error = refusal(path)
    assert error.what.startswith(key)
    assert error.what.endswith(f": {message}")
    assert error.where == f"{path}:5"


def test_what_the_command_line_set_is_not_blamed_on_the_file(recipe):
    path = recipe(GRPO.replace("  train: rows.jsonl\n", "  train: rows.jsonl\n  columns:\n    prompt: q\n"))
    for key in ("data.columns", "data.columns.prompt"):
        with pytest.raises(RecipeError) as caught, load_recipe(path, ["data.columns={prompt: a}"]).placing(()):
            raise RecipeError("is wrong", key=key)
        assert caught.value.place == f"command line: {key}"
    assert refusal(path, "max_steps=no").where == "command line"
    assert refusal(path, "seed=3", "max_steps=no").where == "command line"


def test_a_key_of_a_stage_that_is_left_out_has_the_line_of_the_stage(recipe):
    text = _stages("stage:warm")
    path = recipe(text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if row.strip() == "rl:")
    with pytest.raises(RecipeError) as caught, load_recipe(path).placing(("stages", "rl")):
        raise RecipeError("is wrong", key="batch.prompts")
    assert caught.value.place == f"{path}:{line}: stages.rl.batch.prompts"


def test_a_resolved_recipe_without_lines_keeps_the_key():
    loaded = LoadedRecipe(parse_recipe(yaml.safe_load(GRPO)), Path())
    with pytest.raises(RecipeError) as caught, loaded.placing(()):
        raise RecipeError("is wrong", key="data.train")
    assert caught.value.place == "data.train"


def test_resolved_recipe_parses_back_to_the_same(recipe):
    loaded = load_recipe(recipe(GRPO)).recipe
    assert parse_recipe(loaded.model_dump(mode="json")) == loaded


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("optimizer: {lr: 1.0e-5}", "unknown key optimizer.lr", "optimizer.learning_rate"),
        ("batch: 8", "batch is a section of keys", "rows"),
        ("adapter: lora", "adapter is a section of keys", "kind"),
        ("num_train_epochs: 3", "unknown key num_train_epochs", "epochs"),
        ("seed: true", "seed: Input should be a number", ""),
        ("chat_template: chatmll", "no built-in template", ""),
        ("evaluation: {every: 2}", "acts only with data.eval", ""),
    ],
)
def test_what_other_trainers_call_things_and_sections_without_keys(tmp_path, line, message, hint):
    (tmp_path / "r.yaml").write_text(f"method: sft\nmodel: m\nrun_dir: r\nmax_steps: 1\ndata: {{train: a.jsonl}}\n{line}\n")
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(tmp_path / "r.yaml")
    assert hint in str(error.value.hint)


def test_a_share_outside_its_range_names_the_key_and_not_a_type(tmp_path):
    (tmp_path / "r.yaml").write_text("method: sft\nmodel: m\nrun_dir: r\nmax_steps: 1\ndata: {train: a.jsonl, eval: 1.5}\n")
    with pytest.raises(RecipeError, match=r"^[^:]*r.yaml:5: data.eval: "):
        load_recipe(tmp_path / "r.yaml")


def test_a_loss_named_as_a_method_points_to_dpo(tmp_path):
    (tmp_path / "r.yaml").write_text("method: kto\nmodel: m\nrun_dir: r\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "r.yaml")
    assert "loss: {kind: kto}" in str(error.value.hint)
