"""`postgrad rewards`: before training, what is known of them (`check`) and which layer of an answer each notices (`matrix`); after it,
what leaving one out changes (`ablate`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postgrad.errors import CheckFailed, RecipeError, reason
from postgrad.suggest import did_you_mean_file

if TYPE_CHECKING:
    from postgrad.rewards.check import Report, Sample
    from postgrad.rewards.ledger import Scheme
    from postgrad.rewards.load import LoadedReward
    from postgrad.train.recipe import RLRecipe

app = typer.Typer(help="Check rewards before training; leave one out after it.", no_args_is_help=True)

TargetArgument = Annotated[
    list[str], typer.Argument(help="rewards.py (all of its rewards), rewards.py:name[,name], a shipped reward, or a recipe (.yaml).")
]
DataOption = Annotated[str | None, typer.Option(help="Rows with good answers; default: the recipe's training data.")]
RolloutsOption = Annotated[Path | None, typer.Option(help="Rollouts of a run instead: the best of each prompt is the good answer.")]
GoldOption = Annotated[str | None, typer.Option(help="Column with the good answer: text, or messages. Default: found by its name.")]
ColumnsOption = Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN[,COLUMN] as in the recipe's columns; repeat for several.")]
ArgsOption = Annotated[list[str] | None, typer.Option(help="NAME=VALUE bound to every reward that takes it, as `args` in a recipe.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows to use at most, spread over the file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.command()
def check(
    targets: TargetArgument,
    data: DataOption = None,
    rollouts: RolloutsOption = None,
    gold: GoldOption = None,
    columns: ColumnsOption = None,
    arg: ArgsOption = None,
    rows: RowsOption = 500,
    json_output: JsonOption = False,
) -> None:
    """Contract, lazy strategies, scope and scale of rewards, in seconds and without a model; exit code 4 when something is critical."""
    report = _report(targets, data, rollouts, gold, columns, arg, rows)
    if json_output:
        print(json.dumps(report.to_json(), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        print("\n".join(report.lines()))
    if report.critical:
        names = ", ".join(dict.fromkeys(found.id for found in report.critical))
        raise CheckFailed(f"critical: {names}", where=" ".join(targets), hint="see the findings above")


@app.command()
def matrix(
    targets: TargetArgument,
    data: DataOption = None,
    rollouts: RolloutsOption = None,
    gold: GoldOption = None,
    columns: ColumnsOption = None,
    arg: ArgsOption = None,
    rows: RowsOption = 500,
    json_output: JsonOption = False,
) -> None:
    """Which layer of a good answer each reward notices: structure, reasoning, tool calls, tool results, final answer, length."""
    report = _report(targets, data, rollouts, gold, columns, arg, rows)
    if json_output:
        print(json.dumps(report.to_json()["matrix"], ensure_ascii=False, indent=1, allow_nan=False))
        return
    print("\n".join(report.matrix_lines()).lstrip("\n"))
    for found in report.findings:
        if found.id.startswith("scope."):
            print(f"{found.severity}: {found.reward + ': ' if found.reward else ''}{found.message}")


@app.command()
def ablate(
    run: Annotated[Path, typer.Argument(help="A run directory; without --gradient and --trained whatever `postgrad doctor` reads.")],
    reward: Annotated[list[str] | None, typer.Option(help="Leave out only this reward; repeat for several. Default: each in turn.")] = None,
    gradient: Annotated[bool, typer.Option("--gradient", help="Which way each reward pulls the weights, on one stored batch.")] = False,
    at: Annotated[
        str | None, typer.Option(help="start or final: the model that --gradient looks at. Default: final if there is a checkpoint.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Step whose rollouts --gradient looks at.")] = None,
    trained: Annotated[bool, typer.Option("--trained", help="Train short runs, each without one reward, and compare behaviour.")] = False,
    seeds: Annotated[int, typer.Option(min=3, help="Seeds of --trained.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run of --trained.")] = 20,
    outcome: Annotated[
        list[str] | None, typer.Option(help="Name of the reward that is the task itself, where a file does not say.")
    ] = None,
    weight: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, where a file does not say; repeat for several.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Leave a reward out: what changes in the advantages of a run's rollouts (no model), in its gradient, or in short runs."""
    from postgrad.cli.ablate import Asked, run_ablate

    asked = Asked(
        rewards=reward or [], outcome=outcome or [], weights=weight or [], gradient=gradient, at=at, batch=batch, trained=trained,
        seeds=seeds, steps=steps,
    )  # fmt: skip
    run_ablate(run, asked, json_output=json_output)


@dataclass(frozen=True)
class _Target:
    """Rewards, and what a recipe says beside them."""

    rewards: list[LoadedReward]
    recipe: RLRecipe | None = None
    base: Path = Path()

    @property
    def scheme(self) -> Scheme:
        from postgrad.rewards.ledger import Scheme
        from postgrad.train.presets import loss_settings
        from postgrad.train.recipe import GRPORecipe

        if self.recipe is None:
            return Scheme("group")
        return loss_settings(self.recipe.loss, self.recipe.rollout).scheme if isinstance(self.recipe, GRPORecipe) else Scheme("none")


def _report(
    targets: list[str],
    data: str | None,
    rollouts: Path | None,
    gold: str | None,
    columns: list[str] | None,
    arg: list[str] | None,
    rows: int,
) -> Report:
    from postgrad.rewards.check import check_rewards
    from postgrad.rewards.combine import STEP
    from postgrad.rewards.load import check_columns

    target = _load(targets, dict(_argument(text) for text in arg or []))
    samples = _samples(target, data, rollouts, gold, columns, rows)
    if any(STEP in reward.form.required for reward in target.rewards):
        samples = [replace(sample, prompt=replace(sample.prompt, columns={STEP: 0, **sample.prompt.columns})) for sample in samples]
    check_columns(target.rewards, frozenset.intersection(*(frozenset(sample.prompt.columns) for sample in samples)))
    return check_rewards(target.rewards, samples, scheme=target.scheme, weighted=target.recipe is not None)


def _load(targets: list[str], args: dict[str, Any]) -> _Target:
    if len(targets) == 1 and Path(targets[0]).suffix in (".yaml", ".yml"):
        if args:
            raise RecipeError("a recipe has the args of its rewards", where="--arg", hint="leave --arg out")
        return _load_recipe(Path(targets[0]))
    from postgrad.cli.console import from_option
    from postgrad.rewards.load import load_rewards

    specs: list[dict[str, Any]] = [{"use": use} for target in targets for use in _names(target)]
    if args:
        specs = [{**spec, "args": _taken(spec["use"], args)} for spec in specs]
    with from_option("command line"):
        return _Target(load_rewards(specs, Path.cwd()))


def _names(target: str) -> list[str]:
    """`rewards.py` as every reward in it, `rewards.py:a,b` as both."""
    file, colon, functions = target.rpartition(":")
    if colon:
        return [f"{file}:{name}" for name in functions.split(",")]
    return _all_of(Path(target)) if target.endswith(".py") else [target]


def _all_of(path: Path) -> list[str]:
    from postgrad.rewards.check.bench import names_in

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = did_you_mean_file(path, "name a Python file")
        raise RecipeError(f"cannot read the reward file: {reason(error)}", where=str(path), hint=hint) from None
    found = names_in(str(path.resolve()), text)
    if isinstance(found, dict):
        raise RecipeError(found["problem"]["message"], where=found["problem"]["where"] or str(path))
    if not found:
        raise RecipeError("the file defines no reward", where=str(path), hint="a reward's first parameter is `rollout` or `completion`")
    return [f"{path}:{name}" for name in found]


def _taken(use: str, args: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a reward takes: tried one by one, because only the worker knows its signature."""
    from postgrad.rewards.load import load_rewards

    taken: dict[str, Any] = {}
    for name, value in args.items():
        try:
            load_rewards([{"use": use, "args": {**taken, name: value}}], Path.cwd())
        except RecipeError as error:
            if "takes no argument" in error.what:
                continue
        taken[name] = value
    return taken


def _argument(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RecipeError(f"{text!r} is not NAME=VALUE", where="--arg", hint="e.g. --arg max_tokens=256")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"{value!r} is no YAML value", where="--arg", hint="quote text that has special characters") from None


def _load_recipe(path: Path) -> _Target:
    from postgrad.cli.console import stderr
    from postgrad.rewards.load import load_rewards
    from postgrad.train.recipe import RLRecipe
    from postgrad.train.recipe_file import load_recipe

    loaded = load_recipe(path)
    found = [(part, recipe) for part, recipe in loaded.parts if isinstance(recipe, RLRecipe)]
    if not found:
        raise RecipeError(
            "the recipe has no rewards", where=str(path), hint="name the reward file: postgrad rewards check rewards.py --data …"
        )
    part, recipe = found[-1]
    functions = {index: reward.model_dump() for index, reward in enumerate(recipe.rewards) if _is_function(reward.use)}
    for index, reward in enumerate(recipe.rewards):
        if index not in functions:
            stderr.print(f"not checked: {reward.use} is a reward model (postgrad score shows what it gives)", markup=False)
    if not functions:
        raise RecipeError("the recipe has no reward functions", where=str(path), hint="reward models are looked at with postgrad score")
    with loaded.placing(part):
        return _Target(load_rewards(functions, loaded.base), recipe, loaded.base)


def _is_function(use: str) -> bool:
    from postgrad.rewards.library import LIBRARY

    return ".py" in use or use in LIBRARY


def _samples(
    target: _Target, data: str | None, rollouts: Path | None, gold: str | None, columns: list[str] | None, rows: int
) -> list[Sample]:
    from postgrad.cli.data import parse_columns
    from postgrad.cli.reward_samples import samples_of, samples_of_rollouts
    from postgrad.data import load_rows
    from postgrad.train.datasets import open_rows

    if rollouts is not None:
        if data is not None:
            raise RecipeError("both --data and --rollouts", where="--rollouts", hint="name one source of good answers")
        return samples_of_rollouts(rollouts, most=rows)
    if data is not None:
        mapped = parse_columns(columns) or (target.recipe.data.columns if target.recipe is not None else None)
        return samples_of(load_rows(data, columns=mapped), gold=gold, most=rows)
    if target.recipe is None:
        raise RecipeError("no data", where="command line", hint="name rows with good answers: --data FILE, or --rollouts FILE")
    return samples_of(open_rows(target.recipe, target.base)[0], gold=gold, most=rows)
