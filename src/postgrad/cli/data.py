"""`postgrad data`: what is trained, token by token (`show`), and what became of every row (`check`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from postgrad.errors import RecipeError

if TYPE_CHECKING:
    from postgrad.chat import ChatFormat
    from postgrad.data import DataReport, PromptData, RowSet, SFTData
    from postgrad.types import ToolSpec

app = typer.Typer(help="Check a data file and see what is trained, token by token.", no_args_is_help=True)

FileArgument = Annotated[
    str, typer.Argument(help="A .jsonl, .json, .parquet or .csv file, a hub id, or a recipe (.yaml), whose settings are then used.")
]
ModelOption = Annotated[str, typer.Option(help="Its tokenizer and chat template are used: built-in name, folder, hub id or .gguf.")]
MethodOption = Annotated[str, typer.Option(help="sft or grpo.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Longest row (grpo: longest prompt), in tokens.")]
OverlongOption = Annotated[str, typer.Option(help="What happens to a longer row: drop, cut or error.")]
TrainOnOption = Annotated[str, typer.Option(help="assistant, last or all.")]
ColumnsOption = Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN[,COLUMN] as in the recipe's columns; repeat for several.")]
MaxBadOption = Annotated[int, typer.Option(min=0, help="Rejected rows that are tolerated.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]

Method = Literal["sft", "grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both commands take; the defaults are a recipe's."""

    file: str
    model: str
    method: Method
    max_length: int
    overlong: Literal["drop", "cut", "error"]
    train_on: Literal["assistant", "last", "all"]
    columns: Mapping[str, str | list[str]]
    max_bad: int
    tools: tuple[ToolSpec, ...] = ()
    system: str | None = None


@app.command()
def show(
    file: FileArgument,
    model: ModelOption = "smollm2-135m",
    method: MethodOption = "sft",
    max_length: LengthOption = 1024,
    overlong: OverlongOption = "drop",
    train_on: TrainOnOption = "assistant",
    columns: ColumnsOption = None,
    max_bad: MaxBadOption = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to show; default: 3 in the terminal, all with --json.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Show rows as tokens: ⟦trained⟧, context, and ‹glue› of the template."""
    options = _options(file, model, method, max_length, overlong, train_on, columns, max_bad)
    if options.method == "sft":
        _show_sft(options, rows, json_output=json_output)
    else:
        _show_prompts(options, rows, json_output=json_output)


@app.command()
def check(
    file: FileArgument,
    model: ModelOption = "smollm2-135m",
    method: MethodOption = "sft",
    max_length: LengthOption = 1024,
    overlong: OverlongOption = "drop",
    train_on: TrainOnOption = "assistant",
    columns: ColumnsOption = None,
    max_bad: MaxBadOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Say what became of every row: format, kept, dropped and why, cut, trained tokens."""
    options = _options(file, model, method, max_length, overlong, train_on, columns, max_bad)
    rows, chat = _load(options)
    report = (_sft(rows, chat, options) if options.method == "sft" else _prompts(rows, chat, options)).report
    if json_output:
        print(json.dumps(_report_json(report), ensure_ascii=False))
        return
    for line in report.lines():
        print(line)


# ---- what the commands do


def _show_sft(options: Options, limit: int | None, *, json_output: bool) -> None:
    rows, chat = _load(options)
    data = _sft(rows, chat, options)
    count = min(len(data.rows), limit or (len(data.rows) if json_output else 3))
    for name, row, source in list(zip(data.row_names, data.rows, data.sources, strict=True))[:count]:
        if json_output:
            _print_json({"row": name, "token_ids": row.token_ids, "train": [int(flag) for flag in row.trained], "source": source})
        else:
            print(f"{name}: {len(row.token_ids)} tokens, {row.trained_tokens} trained")
            print(marked(chat, row.token_ids, row.trained, source), end="\n\n")
    _print_report(data.report, shown=count, legend="⟦trained⟧ context ‹glue›")


def _show_prompts(options: Options, limit: int | None, *, json_output: bool) -> None:
    rows, chat = _load(options)
    data = _prompts(rows, chat, options)
    count = min(len(data.prompts), limit or (len(data.prompts) if json_output else 3))
    for prompt in data.prompts[:count]:
        ids = chat.raw_prompt_ids(prompt.raw_text) if prompt.raw_text is not None else chat.prompt_ids(prompt.messages, options.tools)
        if json_output:
            _print_json({"row": prompt.row, "token_ids": ids, "train": [0] * len(ids), "source": ["context"] * len(ids)})
        else:
            print(f"{prompt.row}: {len(ids)} tokens; columns for the rewards: {', '.join(prompt.columns) or 'none'}")
            print(visible(chat.decode_raw(ids)), end="\n\n")
    _print_report(data.report, shown=count, legend="the prompt as the model reads it")


def marked(chat: ChatFormat, token_ids: tuple[int, ...], trained: tuple[bool, ...], source: tuple[str, ...]) -> str:
    """The row's text with every stretch of trained tokens in ⟦ ⟧, of glue in ‹ ›; readable without colour."""
    kinds = ["trained" if flag else "glue" if origin == "glue" else "context" for flag, origin in zip(trained, source, strict=True)]
    brackets = {"trained": ("⟦", "⟧"), "glue": ("‹", "›"), "context": ("", "")}
    parts: list[str] = []
    for kind, stretch in groupby(zip(kinds, token_ids, strict=True), key=lambda pair: pair[0]):
        opening, closing = brackets[kind]
        parts.append(opening + visible(chat.decode_raw([token for _, token in stretch])) + closing)
    return "".join(parts)


def visible(text: str) -> str:
    """Line ends shown as ⏎ (and kept), other control characters escaped, so a data file cannot drive the terminal.

    >>> visible("a\\n\\x1b[31mb")
    'a⏎\\n\\\\x1b[31mb'
    """
    return "".join("⏎\n" if letter == "\n" else letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _load(options: Options) -> tuple[RowSet, ChatFormat]:
    """The file is read first: its faults show before a model is looked for."""
    from postgrad.chat import ChatFormat
    from postgrad.data import load_rows

    rows = load_rows(options.file, columns=options.columns, max_bad=options.max_bad)

    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer(options.model)
    return rows, ChatFormat(tokenizer, stop_ids=stop_ids)


def _sft(rows: RowSet, chat: ChatFormat, options: Options) -> SFTData:
    from postgrad.data import prepare_sft

    return prepare_sft(rows, chat, max_length=options.max_length, overlong=options.overlong, train_on=options.train_on, tools=options.tools)


def _prompts(rows: RowSet, chat: ChatFormat, options: Options) -> PromptData:
    from postgrad.data import prepare_prompts

    if options.overlong == "cut":
        raise RecipeError("a prompt is never cut", where="--overlong", hint="use drop or error with --method grpo")
    return prepare_prompts(
        rows, chat, max_prompt_tokens=options.max_length, overlong=options.overlong, tools=options.tools, system=options.system
    )


# ---- options and output


def _options(
    file: str, model: str, method: str, max_length: int, overlong: str, train_on: str, columns: list[str] | None, max_bad: int
) -> Options:
    if Path(file).suffix in {".yaml", ".yml"}:
        return _recipe_options(Path(file))
    return Options(
        file=file,
        model=model,
        method=_one_of("--method", method, {"sft": "sft", "grpo": "grpo"}),
        max_length=max_length,
        overlong=_one_of("--overlong", overlong, {"drop": "drop", "cut": "cut", "error": "error"}),
        train_on=_one_of("--train-on", train_on, {"assistant": "assistant", "last": "last", "all": "all"}),
        columns=dict(_column(text) for text in columns or []),
        max_bad=max_bad,
    )


def _recipe_options(path: Path) -> Options:
    """The settings with which the recipe would read its training data."""
    from postgrad.rollout.tools import load_tools
    from postgrad.train.recipe import GRPORecipe, SFTRecipe
    from postgrad.train.recipe_file import load_recipe

    loaded = load_recipe(path)
    recipe = loaded.recipe
    if not isinstance(recipe, SFTRecipe | GRPORecipe) or recipe.model.startswith("stage:"):
        raise RecipeError("the recipe has stages", where=str(path), hint="name a stage's data file, with --model, --method and --columns")
    beside = loaded.base / recipe.data.train
    return Options(
        file=str(beside) if beside.exists() else recipe.data.train,
        model=recipe.model,
        method=recipe.method,
        max_length=recipe.data.max_length,
        overlong=recipe.data.overlong,
        train_on=recipe.data.train_on if isinstance(recipe, SFTRecipe) else "assistant",
        columns=recipe.data.columns,
        max_bad=recipe.data.max_bad,
        tools=tuple(load_tools(recipe.tools, loaded.base).specs),
        system=recipe.system if isinstance(recipe, GRPORecipe) else None,
    )


def _one_of(option: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise RecipeError(f"{value!r} is not one of {', '.join(known)}", where=option, hint=f"e.g. {option} {next(iter(known))}")
    return known[value]


def _column(text: str) -> tuple[str, str | list[str]]:
    field, equals, names = text.partition("=")
    if not equals or not names:
        raise RecipeError(f"{text!r} is not FIELD=COLUMN", where="--columns", hint="e.g. --columns prompt=question")
    parts = names.split(",")
    return field, parts if len(parts) > 1 else names


def _report_json(report: DataReport) -> dict[str, Any]:
    findings = [
        {"id": "rejected", "severity": "warning", "count": len(report.rejected), "rows": [row.name for row in report.rejected],
         "message": report.rejected[0].reason}
    ] if report.rejected else []  # fmt: skip
    return {
        "format": report.format,
        "rows": report.rows,
        "kept": report.kept,
        "dropped": dict(report.dropped),
        "cut": report.cut,
        "trained_tokens": report.trained_tokens,
        "tokens": report.tokens,
        "notes": list(report.notes),
        "findings": findings,
    }


def _print_json(record: Mapping[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False))


def _print_report(report: DataReport, *, shown: int, legend: str) -> None:
    from postgrad.cli.console import stderr

    for line in _footer(report, shown, legend):
        stderr.print(line, markup=False)


def _footer(report: DataReport, shown: int, legend: str) -> Iterator[str]:
    yield f"{shown} of {report.kept} rows shown: {legend}"
    yield from report.lines()
