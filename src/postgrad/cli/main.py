"""`postgrad`: parse, call, print. Commands import what they need when they run, so `--help` answers at once."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from postgrad import __version__
from postgrad.cli.data import app as data_app
from postgrad.cli.rewards import app as rewards_app
from postgrad.errors import PostgradError

app = typer.Typer(
    name="postgrad", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="LLM post-training you can trust, read and run: SFT, reward models, DPO, PPO, GRPO, and agents with tools.",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


@app.command()
def demo(
    chapter: Annotated[
        str,
        typer.Argument(
            help="tools (SFT, then Agent GRPO), shop (two tools), ppo (GRPO beside PPO), preferences, rlhf (SFT to PPO); or a trap of "
            "reward design before and after its remedy: hacking, sparsity, collapse or conflict."
        ),
    ] = "tools",
    quick: Annotated[bool, typer.Option("--quick", help="The same line in a few minutes, with fewer steps and problems.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of data, noise and order.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Where to write; default runs/demo or runs/demo-quick.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again if the folder already holds a run.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """A real model learns on this machine, with a before/after table: to use a tool, or to prefer one kind of answer."""
    from postgrad.errors import RecipeError

    if chapter in ("tools", "shop", "ppo"):
        from postgrad.cli.demo import run_demo

        run_demo(chapter, quick=quick, seed=seed, run_dir=run_dir, overwrite=overwrite, json_output=json_output)
    elif chapter == "preferences":
        from postgrad.cli.demo_preferences import run_preferences

        run_preferences(quick=quick, seed=seed, run_dir=run_dir, overwrite=overwrite, json_output=json_output)
    elif chapter == "rlhf":
        from postgrad.cli.demo_rlhf import run_rlhf

        run_rlhf(quick=quick, seed=seed, run_dir=run_dir, overwrite=overwrite, json_output=json_output)
    elif chapter in ("hacking", "sparsity", "collapse", "conflict"):
        from postgrad.cli.demo_traps import run_trap

        run_trap(chapter, quick=quick, seed=seed, run_dir=run_dir, overwrite=overwrite, json_output=json_output)
    else:
        known = "tools, shop, ppo, preferences, rlhf, hacking, sparsity, collapse or conflict"
        raise RecipeError(f"no chapter {chapter!r}", where="demo", hint=known)


@app.command()
def init(
    method: Annotated[str, typer.Argument(help="sft, reward, dpo, grpo, ppo or agent.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Write a commented recipe and its files into FOLDER; they run as they are with the built-in model."""
    from postgrad.cli.init import run_init

    run_init(method, folder)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. optimizer.learning_rate=1e-5")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, load, build one batch, show what is trained, stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of another recipe in the same run_dir.")] = False,
) -> None:
    """Train what the recipe says: its method, or its stages in order."""
    from postgrad.cli.train import run_train

    run_train(recipe, overrides or [], dry_run=dry_run, overwrite=overwrite)


@app.command()
def score(
    model: Annotated[str, typer.Argument(help="A reward model: its folder or run directory.")],
    file: Annotated[str, typer.Argument(help="Rows with answers, or preference pairs.")],
    columns: Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN[,COLUMN] as in the recipe's columns; repeat for several.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per row on stdout.")] = False,
) -> None:
    """Score answers with a reward model."""
    from postgrad.cli.data import parse_columns
    from postgrad.cli.score import run_score

    run_score(model, file, columns=parse_columns(columns), json_output=json_output)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="The run directory of GRPO, PPO or pairs.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes to the recipe, e.g. rewards.0.weight=0.5")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the new values here, one line per rollout, for postgrad doctor.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Score a run's stored rollouts again, with rewards that were changed since. Samples and trains nothing."""
    from postgrad.cli.replay import run_replay

    run_replay(run, overrides or [], out=out, json_output=json_output)


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Continue a run that was stopped, bit for bit."""
    from postgrad.cli.train import run_resume

    run_resume(run)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, run directory, hub id or .gguf.")] = "smollm2-135m",
    tools: Annotated[list[str] | None, typer.Option(help="file.py:function; repeat for several.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn.")] = 256,
) -> None:
    """Talk to a model; with tools, its calls are executed and shown."""
    from postgrad.cli.generate import run_chat

    run_chat(model, tools=tools or [], system=system, temperature=temperature, max_tokens=max_tokens)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, run directory, hub id or .gguf.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts; or use --data.")] = None,
    data: Annotated[Path | None, typer.Option(help="A file of prompts.")] = None,
    tools: Annotated[list[str] | None, typer.Option(help="file.py:function; repeat for several.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep this many tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest; 0 is off.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per rollout: messages, segments, stop reason.")] = False,
) -> None:
    """Complete prompts."""
    from postgrad.cli.generate import run_generate
    from postgrad.protocols import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    run_generate(
        model, prompt or [], data=data, tools=tools or [], system=system, samples=samples, params=params, max_tokens=max_tokens, seed=seed,
        json_output=json_output,
    )  # fmt: skip


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="A GRPO recipe or the run directory of one: its tools, rewards and limits are used.")],
    model: Annotated[str | None, typer.Option(help="Model to judge; default: the run's own, or the recipe's.")] = None,
    data: Annotated[str | None, typer.Option(help="Prompts; default: the recipe's data.eval.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="First rows only.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Score a model on held-out prompts as the recipe's `evaluation` says (greedy unless it says otherwise), with 95 % intervals."""
    from postgrad.cli.evaluate import run_eval

    run_eval(recipe, model=model, data=data, rows=rows, json_output=json_output)


@app.command()
def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory, a .jsonl of rollouts, TRL's output_dir, or verl's rollout_data_dir.")],
    outcome: Annotated[
        list[str] | None, typer.Option(help="Name of the reward that is the task itself, where the file does not say.")
    ] = None,
    weight: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, where the file does not say; repeat for several.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """What the rollouts of a run say about its rewards; exit code 4 when something is critical."""
    from postgrad.cli.doctor import run_doctor

    run_doctor(run, outcome=outcome or [], weights=weight or [], json_output=json_output)


@app.command()
def formulas(json_output: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False) -> None:
    """Every formula on one sheet, each line computed now by the function it names."""
    from postgrad.cli.formulas import run_formulas

    run_formulas(json_output=json_output)


app.add_typer(data_app, name="data")
app.add_typer(rewards_app, name="rewards")


def main() -> None:
    """Entry point: user errors end in one message and the exit code of `errors`; bugs keep their traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode gets escapes, not a traceback
    try:
        app()
    except PostgradError as error:
        from postgrad.cli.console import print_error

        print_error(error)
        raise SystemExit(error.exit_code) from None
