"""Reads a recipe: YAML with its lines, `a.b=c` overrides, validation, and errors that name key, file:line and the nearest valid key.

1. `read_yaml` parses with PyYAML's safe loader into plain values plus the line of every key. Tags, duplicate keys and non-mapping
   files are refused; `1e-5` is a float (YAML 1.1 calls it a string).
2. `apply_overrides` sets `a.b=c` from the command line.
3. `load_recipe` validates with pydantic and translates what it says.
4. `LoadedRecipe.placing` gives the line to what is found wrong only later, when files are opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from postgrad.errors import PostgradError, RecipeError, reason
from postgrad.suggest import did_you_mean, did_you_mean_file
from postgrad.train.recipe import METHODS, PAIR_LOSSES, REFERENCE_FREE_LOSSES, Pipeline, Recipe
from postgrad.train.stages import fault_of

KeyPath = tuple[str, ...]
PREFERENCE_NAMES = frozenset({*PAIR_LOSSES, *REFERENCE_FREE_LOSSES, "kto"}) - {"sft"}
PIPELINE_KEYS = frozenset({"run_dir", "seed"})


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed YAML file: its values and the line of every key path."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]
    text: str
    overridden: frozenset[KeyPath] = frozenset()

    def where(self, key: KeyPath) -> str:
        """`file:line` of the key, or of its nearest ancestor that stands in the file; "command line" for what was set there."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.overridden:
                return "command line"
            if key[:length] in self.lines:
                return f"{self.path}:{self.lines[key[:length]]}"
        return str(self.path)


class _Loader(yaml.SafeLoader):
    """SafeLoader whose floats include `1e-5`."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*(e[-+]?\d+)?|\.\d[\d_]*(e[-+]?\d+)?|\d[\d_]*e[-+]?\d+|\.inf|\.nan)$", re.IGNORECASE),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> Source:
    """Parse `path`. Raises `RecipeError` with file:line for everything that is not a plain YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        hint = did_you_mean_file(path, "pass the path of a YAML file")
        raise RecipeError(f"the recipe cannot be read: {reason(error)}", where=str(path), hint=hint) from error
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if root is None or not isinstance(root, yaml.MappingNode):
            raise RecipeError("a recipe is a YAML mapping of keys to values", where=str(path), hint="start from `postgrad init sft DIR`")
        _walk(root, (), path, lines)
        values: dict[str, Any] = loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"not valid YAML: {problem}", where=where, hint="indent with spaces and close every quote") from error
    return Source(path=path, values=values, lines=lines, text=text)


def _walk(node: yaml.Node, key: KeyPath, path: Path, lines: dict[KeyPath, int]) -> None:
    if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
        raise RecipeError(
            f"YAML tag {node.tag!r} is not allowed", where=f"{path}:{node.start_mark.line + 1}", hint="write the value itself"
        )
    if isinstance(node, yaml.MappingNode):
        for name_node, value in node.value:
            child = (*key, str(name_node.value))
            line = name_node.start_mark.line + 1
            if child in lines:
                raise RecipeError(
                    f"key {'.'.join(child)!r} stands twice (first at line {lines[child]})", where=f"{path}:{line}", hint="keep one"
                )
            lines[child] = line
            _walk(value, child, path, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[*key, str(index)] = value.start_mark.line + 1
            _walk(value, (*key, str(index)), path, lines)


def apply_overrides(source: Source, overrides: Sequence[str]) -> Source:
    """Set each `a.b=value` (the value is YAML). Unknown keys are found later, by validation."""
    values = _copy(source.values)
    overridden: set[KeyPath] = set()
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise _bad_override(override, "is not of the form key.path=value")
        *parents, last = dotted.split(".")
        target: Any = values
        for name in parents:
            target = target.setdefault(name, {}) if isinstance(target, dict) else target[_item(target, name, override)]
            if not isinstance(target, dict | list):
                raise _bad_override(override, f"goes through {name!r}, which is a value, not a section")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise _bad_override(override, "has a value that is not valid YAML") from error
        target[last if isinstance(target, dict) else _item(target, last, override)] = value
        overridden.add((*parents, last))
    # What an override replaced stands in the file no more, nor does anything below it.
    lines = {key: line for key, line in source.lines.items() if not any(key[: len(path)] == path for path in overridden)}
    return replace(source, values=values, lines=lines, overridden=frozenset(overridden))


def _item(items: list[Any], name: str, override: str) -> int:
    """The index of a list item that an override names."""
    if not name.isdecimal() or int(name) >= len(items):
        raise _bad_override(override, f"names item {name!r} of a list of {len(items)}")
    return int(name)


def _bad_override(override: str, what: str) -> RecipeError:
    hint = "e.g. optimizer.learning_rate=1e-5 or rewards.0.weight=0.5"
    return RecipeError(f"override {override!r} {what}", where="command line", hint=hint)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A validated recipe, the folder its relative paths start from, the text of its file and, where that was just read, its lines."""

    recipe: Recipe | Pipeline
    base: Path
    text: str = ""
    source: Source | None = None

    @property
    def parts(self) -> list[tuple[KeyPath, Recipe]]:
        """The recipe, or those of the stages in order; each with the key under which it stands."""
        if isinstance(self.recipe, Pipeline):
            return [(("stages", name), recipe) for name, recipe in self.recipe.stages.items()]
        return [((), self.recipe)]

    @contextmanager
    def placing(self, part: KeyPath) -> Iterator[None]:
        """An error in the block that is about a key of this part also says which part, and which line of which file that is."""
        try:
            yield
        except PostgradError as error:
            if error.key is not None:
                key = re.findall(r"\w+", error.key)  # `rewards[0].use` is rewards, 0, use
                error.line = self.source.where((*part, *key)) if self.source is not None else None
                error.key = ".".join((*part, error.key))
            raise


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, override and validate. Everything wrong with the recipe is a `RecipeError` before any model loads."""
    source = apply_overrides(read_yaml(path), overrides)
    recipe = _pipeline(source) if "stages" in source.values else _validate(source, source.values, ())
    return LoadedRecipe(recipe, path.parent, source.text, source)


def parse_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe | Pipeline:
    """Validate a recipe that was already resolved (a run directory's resolved.json), with overrides."""
    source = apply_overrides(Source(path=Path("resolved.json"), values=values, lines={}, text=""), overrides)
    return _pipeline(source) if "stages" in values else _validate(source, source.values, ())


def _pipeline(source: Source) -> Pipeline:
    stages = source.values["stages"]
    if not isinstance(stages, dict) or not stages:
        raise RecipeError(
            "stages: is a mapping of stage names to recipes", where=source.where(("stages",)), hint="see `postgrad init agent DIR`"
        )
    unknown = [key for key in source.values if key not in PIPELINE_KEYS | {"stages"}]
    if unknown:
        raise _unknown(source, (unknown[0],), sorted(PIPELINE_KEYS | {"stages"}))
    if not isinstance(source.values.get("run_dir"), str):
        raise RecipeError(
            "run_dir is missing: the folder that the stages are written to", where=str(source.path), hint="run_dir: runs/NAME"
        )
    run_dir, seed = source.values["run_dir"], source.values.get("seed", 0)
    recipes: dict[str, Recipe] = {}
    for name, values in stages.items():
        key = ("stages", str(name))
        if not isinstance(values, dict):
            raise RecipeError(f"stage {name!r} is not a recipe", where=source.where(key), hint="a stage is a mapping of keys to values")
        inherited = {"run_dir": f"{run_dir}/{name}", "seed": seed} | values
        recipe = _validate(source, inherited, key)
        if fault := fault_of(recipe, recipes):
            raise RecipeError(fault.what, where=source.where((*key, *fault.place.key)), hint=fault.hint)
        recipes[str(name)] = recipe
    return Pipeline(run_dir=run_dir, seed=seed, stages=recipes)


def _validate(source: Source, values: dict[str, Any], prefix: KeyPath) -> Recipe:
    method = values.get("method")
    if method not in METHODS:
        hint = did_you_mean(str(method), METHODS, f"one of {', '.join(METHODS)}")
        if method in PREFERENCE_NAMES:
            hint = f"method: dpo with loss: {{kind: {method}}}"
        raise RecipeError(f"method: {method!r} is not a method", where=source.where((*prefix, "method")), hint=hint)
    model = METHODS[method]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _translate(source, model, prefix, error) from error


def _translate(source: Source, model: type[BaseModel], prefix: KeyPath, error: ValidationError) -> RecipeError:
    details = error.errors()
    # An unknown key explains a missing one ("learning_rat"), so it is told first; so is a map of a source, which could have been a string.
    detail = next((item for item in details if item["type"] in ("extra_forbidden", "columns")), details[0])
    key = (*prefix, *_known_parts(model, [str(part) for part in detail["loc"]], keep_last=detail["type"] == "extra_forbidden"))
    if detail["type"] == "extra_forbidden":
        return _unknown(source, key, _names(model, key[len(prefix) : -1]), _elsewhere(model, key[-1]))
    if detail["type"] == "combination":
        key = (*key, *detail["ctx"]["key"].split("."))
        return RecipeError(f"{'.'.join(key)}: {detail['msg']}", where=source.where(key), hint=_describe(model, key[len(prefix) :]))
    dotted = ".".join(key) or "recipe"
    if detail["type"] == "missing":
        return RecipeError(f"{dotted} is missing", where=source.where(key), hint=_describe(model, key[len(prefix) :]))
    if detail["type"] in ("model_type", "model_attributes_type"):
        names = ", ".join(_names(model, key[len(prefix) :])[:6])
        advice = f"write {key[-1]}: {{key: value}}; its keys: {names}"
        return RecipeError(f"{dotted} is a section of keys (got {detail['input']!r})", where=source.where(key), hint=advice)
    message = detail["msg"].removeprefix("Value error, ")
    given = "" if isinstance(detail["input"], dict) else f" (got {detail['input']!r})"
    return RecipeError(f"{dotted}: {message}{given}", where=source.where(key), hint=_describe(model, key[len(prefix) :]))


def _unknown(source: Source, key: KeyPath, valid: Sequence[str], elsewhere: str | None = None) -> RecipeError:
    if key[-1] in ELSEWHERE_CALLED:
        hint = f"here it is called {ELSEWHERE_CALLED[key[-1]]}"
    elif elsewhere:
        hint = f"it belongs to {elsewhere}"
    else:
        hint = did_you_mean(key[-1], valid, f"valid keys here: {', '.join(valid)}")
    return RecipeError(f"unknown key {'.'.join(key)}", where=source.where(key), hint=hint)


ELSEWHERE_CALLED = {
    "lr": "optimizer.learning_rate",
    "num_generations": "rollout.group_size",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "output_dir": "run_dir",
    "model_name_or_path": "model",
    "base_model": "model",
    "batch_size": "batch (see its keys in docs/recipe.md)",
    "per_device_train_batch_size": "batch (see its keys in docs/recipe.md)",
    "gradient_accumulation_steps": "batch.tokens_per_micro_batch: a step is always the whole batch",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "dataset": "data.train",
    "datasets": "data.train",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "packing": "batch.tokens",
    "reward_funcs": "rewards",
    "max_completion_length": "rollout.max_tokens",
}
"""What other trainers call things, and what they are called here."""


def _known_parts(model: type[BaseModel], parts: list[str], *, keep_last: bool) -> list[str]:
    """The key path without the names of types that pydantic adds where a value may have several."""
    known = {name for _, section in _sections(model) for name in section.model_fields}
    return [part for index, part in enumerate(parts) if part in known or part.isdigit() or (keep_last and index == len(parts) - 1)]


def _sections(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        for candidate in _models_in(field.annotation):
            yield from _sections(candidate, (*prefix, name))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    names = tuple(part for part in path if not part.isdigit())
    return next((section for prefix, section in _sections(model) if prefix == names), None)


def _names(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    section = _section_at(model, path)
    return list(section.model_fields) if section else []


def _elsewhere(model: type[BaseModel], name: str) -> str | None:
    """The section that has this exact key, when it was written in the wrong one."""
    found = [prefix for prefix, section in _sections(model) if name in section.model_fields]
    return ".".join((*found[0], name)) if found else None


def _describe(model: type[BaseModel], path: Sequence[str]) -> str | None:
    if not path:
        return None
    section = _section_at(model, path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return field.description if field else None
