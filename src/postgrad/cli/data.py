"""`postgrad data`: what is trained, token by token (`show`), and what a user must know about a file before training on it (`check`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postgrad.cli.data_view import Opened, item_json, item_parts, item_text, report_json, report_lines, visible, why
from postgrad.errors import CheckFailed, RecipeError, reason

if TYPE_CHECKING:
    from postgrad.chat import ChatFormat, ToolProtocol
    from postgrad.data import DataReport, Reading, RowSource

app = typer.Typer(help="Check a data file and see what is trained, token by token.", no_args_is_help=True)

METHODS = ("sft", "reward", "dpo", "grpo", "ppo")

FileArgument = Annotated[
    str,
    typer.Argument(help="A .jsonl, .json (or .gz), .parquet, .csv or .arrow file, a hub id, or a recipe (.yaml), whose settings count."),
]
ModelOption = Annotated[str, typer.Option(help="Its tokenizer and chat template are used: built-in name, folder, hub id or .gguf.")]
MethodOption = Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; left out = what the format is most likely meant for.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Longest row (grpo, ppo: longest prompt), in tokens.")]
OverlongOption = Annotated[str, typer.Option(help="What happens to a longer row: drop, cut or error.")]
TrainOnOption = Annotated[str, typer.Option(help="assistant, last or all.")]
ColumnsOption = Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN[,COLUMN] as in the recipe's columns; repeat for several.")]
TextOption = Annotated[str, typer.Option(help="Text prompts: chat (a user message of the template) or raw.")]
TemplateOption = Annotated[str | None, typer.Option(help="A built-in chat template's name or Jinja text, instead of the tokenizer's own.")]
MaxBadOption = Annotated[int, typer.Option(min=0, help="Rejected rows that are tolerated.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Also write a page to this file.")]


@app.command()
def show(
    file: FileArgument,
    model: ModelOption = "smollm2-135m",
    method: MethodOption = None,
    max_length: LengthOption = 1024,
    overlong: OverlongOption = "drop",
    train_on: TrainOnOption = "assistant",
    columns: ColumnsOption = None,
    text_prompts: TextOption = "chat",
    chat_template: TemplateOption = None,
    max_bad: MaxBadOption = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to show; default: 3 in the terminal, all with --json.")] = None,
    json_output: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Show rows as tokens: ⟦trained⟧, context, and ‹glue› of the template."""
    reading = _reading(method, max_length, overlong, train_on, text_prompts)
    opened = _open(file, model, reading, columns, chat_template, max_bad, None)
    page: list[Any] = []

    def show_one(item: Any) -> None:
        if json_output:
            print(json.dumps(item_json(opened, item), ensure_ascii=False))
        else:
            print(item_text(opened, item), end="\n\n")
        if html is not None:
            page.append(item_parts(opened, item))

    shown, report = _each(opened, rows or (None if json_output else 3), show_one)
    _print_shown(shown, report, legend=not json_output)
    if html is not None:
        from postgrad.report.data_page import rows_page

        _write(html, rows_page(opened.rows.name, page))
    if report is not None and not shown:
        report.verify()


@app.command()
def check(
    file: FileArgument,
    model: ModelOption = "smollm2-135m",
    method: MethodOption = None,
    max_length: LengthOption = 1024,
    overlong: OverlongOption = "drop",
    train_on: TrainOnOption = "assistant",
    columns: ColumnsOption = None,
    text_prompts: TextOption = "chat",
    chat_template: TemplateOption = None,
    max_bad: MaxBadOption = 0,
    heldout: Annotated[str | None, typer.Option("--eval", help="Held-out rows to compare with; a recipe names its own.")] = None,
    json_output: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Read every row as training would: what became of it, what to know about it, and a verdict (exit code 4 = not fit to train on)."""
    from postgrad.cli.console import working
    from postgrad.data import Work, audit

    reading = _reading(method, max_length, overlong, train_on, text_prompts)
    opened = _open(file, model, reading, columns, chat_template, max_bad, heldout)
    with working("reading") as progress:
        report = audit(opened.rows, opened.chat, opened.reading, heldout=opened.heldout, work=Work(progress=progress))
    if json_output:
        print(json.dumps(report_json(report), ensure_ascii=False))
    else:
        _print_report(report, opened)
    if html is not None:
        from postgrad.report.data_page import report_page

        page: list[Any] = []
        _each(opened, 20, lambda item: page.append(item_parts(opened, item)), strict=False)
        _write(html, report_page(report, page))
    if not report.passed:
        raise CheckFailed(why(report), where=opened.rows.name, hint="see the findings above")


# ---- opening


def _reading(method: str | None, max_length: int, overlong: str, train_on: str, text_prompts: str) -> Reading:
    from postgrad.data import Reading

    return Reading(
        method=None if method is None else _one_of("--method", method, METHODS),
        max_length=max_length,
        overlong=_one_of("--overlong", overlong, ("drop", "cut", "error")),
        train_on=_one_of("--train-on", train_on, ("assistant", "last", "all")),
        text_prompts=_one_of("--text-prompts", text_prompts, ("chat", "raw")),
    )


def _open(
    file: str, model: str, reading: Reading, columns: list[str] | None, template: str | None, max_bad: int, heldout: str | None
) -> Opened:
    """The rows are opened first: their faults show before a model is looked for."""
    from postgrad.data import load_rows

    if Path(file).suffix in {".yaml", ".yml"}:
        return _open_recipe(Path(file))
    mapped = parse_columns(columns)
    rows = load_rows(file, columns=mapped, max_bad=max_bad)
    _check_cut(rows, reading)
    other = None if heldout is None else load_rows(heldout, columns=mapped, max_bad=max_bad)
    return Opened(rows, other, _chat(model, template), reading, model)


def _check_cut(rows: RowSource, reading: Reading) -> None:
    method = reading.method_for(rows.parts[0].format)
    if reading.overlong == "cut" and method in ("grpo", "ppo"):
        raise RecipeError("a prompt is never cut", where="--overlong", hint=f"use drop or error with --method {method}")


def _open_recipe(path: Path) -> Opened:
    """The settings with which the recipe would read its training data."""
    from postgrad.data import Reading
    from postgrad.rollout.tools import load_tools
    from postgrad.train.datasets import open_rows
    from postgrad.train.recipe import PairsRecipe, Pipeline, SampledRecipe, SFTRecipe
    from postgrad.train.recipe_file import load_recipe

    loaded = load_recipe(path)
    recipe = loaded.recipe
    if isinstance(recipe, Pipeline) or recipe.model.startswith("stage:"):
        raise RecipeError("the recipe has stages", where=str(path), hint="name a stage's data file, with --model, --method and --columns")
    rows, heldout = open_rows(recipe, loaded.base)
    tools = recipe.tools if isinstance(recipe, SFTRecipe | SampledRecipe) else []
    with load_tools(tools, loaded.base, to_run=False) as toolbox:
        specs = toolbox.specs
    reading = Reading(
        method="grpo" if isinstance(recipe, PairsRecipe) else recipe.method,  # both read prompts
        max_length=recipe.data.max_length,
        overlong=recipe.data.overlong,
        train_on=recipe.data.train_on if isinstance(recipe, SFTRecipe) else "assistant",
        text_prompts=recipe.data.text_prompts,
        tools=specs,
        system=recipe.system if isinstance(recipe, SampledRecipe) else None,
    )
    return Opened(rows, heldout, _chat(recipe.model, recipe.chat_template, recipe.tool_protocol), reading, recipe.model)


def _chat(model: str, template: str | None, tool_protocol: ToolProtocol = "auto") -> ChatFormat:
    from postgrad.chat import ChatFormat
    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer(model)
    return ChatFormat(tokenizer, stop_ids=stop_ids, template=template, tool_protocol=tool_protocol)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise RecipeError(f"{value!r} is not one of {', '.join(known)}", where=option, hint=f"e.g. {option} {known[0]}")
    return value


def parse_columns(given: list[str] | None) -> dict[str, str | list[str]]:
    """`--columns FIELD=COLUMN[,COLUMN]`, any number of them, as a recipe's `columns:`."""
    return dict(_column(text) for text in given or [])


def _column(text: str) -> tuple[str, str | list[str]]:
    field, equals, names = text.partition("=")
    if not equals or not names:
        raise RecipeError(f"{text!r} is not FIELD=COLUMN", where="--columns", hint="e.g. --columns prompt=question")
    parts = names.split(",")
    return field, parts if len(parts) > 1 else names


# ---- rows, token by token


class _Enough(Exception):
    """As many rows as were asked for have been made."""


def _each(opened: Opened, limit: int | None, use: Callable[[Any], object], *, strict: bool = True) -> tuple[int, DataReport | None]:
    """Hands what is made of the rows to `use`, at most `limit` of them: (how many, the report if that was all there is)."""
    from postgrad.data import Work
    from postgrad.data.pipeline import encode
    from postgrad.data.report import report_of

    used = 0

    def take(made: list[Any]) -> None:
        nonlocal used
        for item in made:
            if used == limit:
                raise _Enough
            use(item)
            used += 1

    encoder = opened.encoder
    try:
        tally = encode(opened.rows, None, encoder, take, work=Work(helpers=0), strict=strict)
    except _Enough:
        return used, None
    return used, report_of(opened.rows, tally, encoder)


def _print_shown(shown: int, report: DataReport | None, *, legend: bool) -> None:
    """On stderr, so that stdout holds rows only."""
    from postgrad.cli.console import stderr

    if legend and shown:
        stderr.print("⟦ ⟧ is trained, ‹ › is what the template writes around it, the rest is read only", markup=False)
    if report is None:
        stderr.print(f"the first {shown} rows; `postgrad data check` reads all of them", markup=False)
        return
    for line in (*report.lines(), f"{shown} of {report.rows} rows shown"):
        stderr.print(line, markup=False)


def _write(path: Path, text: str) -> None:
    from postgrad.cli.console import stderr

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"the page cannot be written: {reason(error)}", where=str(path), hint="choose another place") from error
    stderr.print(f"page written to {path}", markup=False)


def _print_report(report: DataReport, opened: Opened) -> None:
    for line in report_lines(report, method=opened.reading.method_for(opened.rows.parts[0].format), model=opened.model):
        print(visible(line))
