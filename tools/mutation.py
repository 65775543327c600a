"""The mutation gate over `postgrad.formulas`: would the tests notice if a formula were wrong?

    python tools/mutation.py                    run all mutants; exit 1 unless at least 95 % of them are killed
    python tools/mutation.py advantages kl      only these modules
    python tools/mutation.py --list             name the mutants, run nothing
    python tools/mutation.py --recheck          also run the mutants that mutation_equivalent.json calls equivalent

1. One process imports torch, collects tests/formulas once, and notes in a forked child which test calls which function.
2. Each mutant changes one node of the syntax tree: an operator, a comparison, a constant, a condition, a mask, a call, an argument.
3. A forked child puts the mutant's code into the live functions and runs the tests that call the mutated function, quickest first,
   until one fails (killed) or none does (survived). A child that needs too much processor time counts as killed.
4. `mutation_equivalent.json` names mutants that no test could kill, each with the reason. They are left out of the share, and must exist.

A mutant's name is `module.function: before → after`, with `#2` for a second one of the same words. No line numbers: code may move.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import inspect
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "src" / "postgrad" / "formulas"
TESTS = ROOT / "tests" / "formulas"
EQUIVALENT = Path(__file__).with_name("mutation_equivalent.json")
LEFT_OUT = {"__init__", "sheet"}  # exports, and data about the formulas: no formula in either
REQUIRED_SHARE = 0.95
CPU_SECONDS = 30

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
SWAPS = {"minimum": "maximum", "amin": "amax", "min": "max", "any": "all", "zeros_like": "ones_like"}
SWAPS |= {after: before for before, after in SWAPS.items()}
TYPE_CHECKERS = {"bool", "int", "float"}  # calls that change a type and no number


Path_ = tuple[tuple[str, int | None], ...]
"""The way from the root of a syntax tree to a node: (field, index in the field's list)."""


@dataclass(frozen=True)
class Mutant:
    """`module` and `function` say where, `name` is its identity; the node at `path` changes in the `way`-th way."""

    module: str
    function: str
    name: str
    path: Path_
    way: int

    def tree(self) -> ast.Module:
        """The whole module with the one node changed."""
        tree = _source(self.module)
        _replace(tree, self.path, list(_ways(_at(tree, self.path)))[self.way](_at(tree, self.path)))
        return ast.fix_missing_locations(tree)


# ---- making mutants --------------------------------------------------------------------------------------------------------------


def mutants_of(module: str) -> list[Mutant]:
    source = _source(module)
    seen: Counter[str] = Counter()
    found = []
    for path, function in _places(source):
        node = _at(source, path)
        for number, way in enumerate(_ways(node)):
            name = f"{module}.{function}: {_words(node)} → {_words(way(copy.deepcopy(node)))}"
            seen[name] += 1
            found.append(Mutant(module, function, name if seen[name] == 1 else f"{name} #{seen[name]}", path, number))
    return found


def _source(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text())


def _places(tree: ast.Module) -> Iterator[tuple[Path_, str]]:
    """Every node that may change, as the way to it from the root, with the qualified name of its function."""

    def walk(node: ast.AST, path: Path_, scope: tuple[str, ...]) -> Iterator[tuple[Path_, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        is_statement = path[-1:] == (("value", None),) and isinstance(_at(tree, path[:-1]), ast.Expr)
        if not is_statement:  # the call of a statement goes with it; its arguments still change
            yield path, ".".join(scope) or "(module)"
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
                continue
            if field in ("annotation", "returns", "decorator_list", "bases", "type_comment") or _is_text(node, field):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST) and not _is_speech(node, child):
                    yield from walk(child, (*path, (field, index)), scope)

    return walk(tree, (), ())


def _is_text(node: ast.AST, field: str) -> bool:
    """Docstrings, f-strings, aliases such as Literal[...] and the contents of `raise`."""
    is_alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and ast.unparse(node.value).startswith("Literal")
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_alias or is_docstring or isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom)


def _is_speech(node: ast.AST, child: ast.AST) -> bool:
    """A text handed to a function: what it says to people."""
    return isinstance(node, ast.Call) and isinstance(child, ast.JoinedStr | ast.Constant) and isinstance(getattr(child, "value", ""), str)


def _words(node: ast.AST) -> str:
    text = ast.unparse(node.test) if isinstance(node, ast.If) else ast.unparse(node)
    return " ".join(text.split())


def _at(tree: ast.AST, path: Path_) -> ast.AST:
    for field, index in path:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def _replace(tree: ast.Module, path: Path_, node: ast.AST) -> None:
    field, index = path[-1]
    parent = _at(tree, path[:-1])
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


Way = Callable[[ast.AST], ast.AST]


def _ways(node: ast.AST) -> Iterator[Way]:
    match node:
        case ast.BinOp() | ast.BoolOp():
            yield from (_with(op=other()) for other in OPERATORS.get(type(node.op), ()))
        case ast.Compare():
            for place, op in enumerate(node.ops):
                others = OPERATORS[type(op)] if len(node.ops) == 1 else OPERATORS[type(op)][:1]
                yield from (_with_comparison(place, other()) for other in others)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            yield lambda n: ast.Constant(1 - value)  # −1 → 0: the other end of a shape or a slice
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield _operand
        case ast.Constant():
            yield from (_with(value=value) for value in _other_constants(node.value))
        case ast.If():
            yield lambda n: _with(test=ast.UnaryOp(ast.Not(), n.test))(n)  # type: ignore[attr-defined]
        case ast.IfExp():
            yield lambda n: n.body  # type: ignore[attr-defined]
            yield lambda n: n.orelse  # type: ignore[attr-defined]
        case ast.Expr(value=ast.Call()):
            yield lambda n: ast.Pass()
        case ast.Call():
            yield from _ways_of_call(node)


def _ways_of_call(node: ast.Call) -> Iterator[Way]:
    """The call dropped (the mask of a `where`, an exp, a clamp), each keyword dropped, the function swapped for its opposite."""
    is_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in ("torch", "math")
    if is_method:
        yield lambda n: n.func.value
    elif ast.unparse(node.func) not in TYPE_CHECKERS:
        kept = [place for place, argument in enumerate(node.args) if not isinstance(argument, ast.Starred | ast.Constant | ast.JoinedStr)]
        if ast.unparse(node.func) == "torch.where":
            yield from (lambda n, p=place: n.args[p] for place in (1, 2))
        elif kept:
            yield lambda n: n.args[kept[0]]
    if isinstance(node.func, ast.Attribute) and node.func.attr in SWAPS:
        yield lambda n: _with(func=_with(attr=SWAPS[n.func.attr])(n.func))(n)
    for place in range(len(node.keywords)):
        yield lambda n, p=place: _with(keywords=n.keywords[:p] + n.keywords[p + 1 :])(n)


def _other_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield f"not {value}"


def _operand(node: ast.AST) -> ast.AST:
    return node.operand  # type: ignore[attr-defined,no-any-return]


def _with(**fields: object) -> Way:
    def change(node: ast.AST) -> ast.AST:
        for field, value in fields.items():
            setattr(node, field, value)
        return node

    return change


def _with_comparison(place: int, op: ast.AST) -> Way:
    def change(node: ast.AST) -> ast.AST:
        node.ops[place] = op  # type: ignore[attr-defined]
        return node

    return change


# ---- putting a mutant into the live modules --------------------------------------------------------------------------------------


def install(mutant: Mutant, tested: list[ModuleType]) -> None:
    """Gives the live functions the mutant's code, so that every reference to them, in tests too, runs it."""
    constants = _install_tree(mutant.module, mutant.tree(), tested)
    if constants:  # defaults in other modules were evaluated from them
        for module in _module_names():
            if module != mutant.module:
                _install_tree(module, _source(module), tested)


def _install_tree(module: str, tree: ast.Module, tested: list[ModuleType]) -> bool:
    live = importlib.import_module(f"postgrad.formulas.{module}")
    fresh: dict[str, object] = {"__name__": live.__name__, "__package__": live.__package__, "__file__": live.__file__}
    spare = ModuleType(live.__name__)  # dataclasses look their module up
    spare.__dict__.update(fresh)
    exec(compile(tree, str(live.__file__), "exec"), spare.__dict__)
    changed = False
    for name, new in vars(spare).items():
        old = vars(live).get(name)
        if isinstance(new, FunctionType) and new.__module__ == live.__name__:
            _copy_code(old, new)
        elif inspect.isclass(new) and new.__module__ == live.__name__:
            for attribute, member in vars(new).items():
                _copy_code(getattr(vars(old).get(attribute), "fget", vars(old).get(attribute)), getattr(member, "fget", member))
        elif isinstance(new, dict) and not name.startswith("__"):
            assert isinstance(old, dict)
            old.clear()
            old.update(new)
        elif isinstance(new, int | float | str | tuple) and not name.startswith("__") and new != old:
            changed = True
            for holder in (*_loaded(), *tested):
                if vars(holder).get(name) is old:
                    setattr(holder, name, new)
    return changed


def _copy_code(old: object, new: object) -> None:
    if isinstance(old, FunctionType) and isinstance(new, FunctionType) and old.__code__.co_freevars == new.__code__.co_freevars:
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def _loaded() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("postgrad.formulas")]


def _module_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in LEFT_OUT)


# ---- running tests in forked children --------------------------------------------------------------------------------------------


class Gate:
    """A pytest plugin: collection is pytest's, the run loop is the gate's."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.mutants = mutants
        self.survivors: list[Mutant] = []
        self.failed_without_mutation = False

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate))  # the smallest counterexample is of no interest
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session) -> bool:
        items = session.items
        session.config.pluginmanager.unregister(name="terminalreporter")  # the children have nothing to say
        tested = list({item.module for item in items if hasattr(item, "module")})
        callers = self._callers(session, items)
        gc.collect()
        gc.freeze()  # the children share this memory; their collector must not touch it
        if callers is None:
            self.failed_without_mutation = True
            return True
        for number, mutant in enumerate(self.mutants, 1):
            status = _in_child(lambda m=mutant: (install(m, tested), _passes(session, _chosen(m, callers, items)))[1])
            if status == 0:
                self.survivors.append(mutant)
            if sys.stderr.isatty():
                print(f"\r{number}/{len(self.mutants)}, {len(self.survivors)} survived", end="", file=sys.stderr)
        return True

    def _callers(self, session, items) -> defaultdict[str, list[tuple[int, float]]] | None:
        """For each function the tests that call it, with their seconds. Measured once, in a child, without a mutation."""
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "calls.json"
            if _in_child(lambda: _note_calls(session, items, notes), cpu_seconds=10 * CPU_SECONDS) != 0:
                return None
            callers: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
            for index, (names, seconds) in enumerate(json.loads(notes.read_text())):
                for name in [*names, "(module)"]:
                    callers[name].append((index, seconds))
            return callers


def _chosen(mutant: Mutant, callers: dict[str, list[tuple[int, float]]], items):
    """The tests that call the mutated function: those of its own file first, quick ones before slow ones."""
    name = mutant.function if mutant.function == "(module)" else f"{mutant.module}.{mutant.function}"
    own = f"test_{mutant.module}.py"
    ranked = sorted(callers.get(name, ()), key=lambda pair: (items[pair[0]].path.name != own, pair[1]))
    return [items[index] for index, _ in ranked]


def _note_calls(session, items, notes: Path) -> bool:
    names: set[str] = set()
    known: dict[CodeType, str | None] = {}

    def note(frame, event: str, _) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            known[code] = f"{Path(code.co_filename).stem}.{code.co_qualname}" if str(FOLDER) in code.co_filename else None
        if name := known[code]:
            names.add(name)

    rows = []
    for item in items:
        names.clear()
        start = time.perf_counter()
        sys.setprofile(note)
        passed = _passes(session, [item])
        sys.setprofile(None)
        rows.append((sorted({name.split(".<")[0] for name in names}), time.perf_counter() - start))
        if not passed:
            print(f"fails without any mutation: {item.nodeid}", file=sys.stderr)
            return False
    notes.write_text(json.dumps(rows))
    return True


def _passes(session, items) -> bool:
    for item in items:
        session._setupstate.teardown_exact(None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            return False
    return True


def _in_child(work: Callable[[], bool], *, cpu_seconds: int = CPU_SECONDS) -> int:
    """0 when `work` returned True. Anything else, a crash and too much processor time included, is another number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 0 if work() else 1
    finally:
        os._exit(status)


# ---- the gate --------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="mutation gate over postgrad.formulas")
    parser.add_argument("modules", nargs="*", help="modules of postgrad.formulas (default: all)")
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    parser.add_argument("--recheck", action="store_true", help="run the listed equivalents as well")
    arguments = parser.parse_args()
    modules = arguments.modules or _module_names()
    mutants = [mutant for module in modules for mutant in mutants_of(module)]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    equivalent: dict[str, str] = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    chosen = [mutant for mutant in mutants if arguments.recheck or mutant.name not in equivalent]
    start = time.monotonic()
    gate = _run(chosen)
    if gate.failed_without_mutation:
        print("the tests fail without any mutation")
        return 1
    return _report(mutants, chosen, gate.survivors, equivalent, modules, time.monotonic() - start)


def _run(mutants: list[Mutant]) -> Gate:
    import pytest
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its first call imports for most of a second: once here, not in each child
    gate = Gate(mutants)
    quiet = ["-q", "--no-header", "--no-summary", "--tb=no", "-o", "timeout=0", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([str(TESTS), *quiet, f"--rootdir={ROOT}"], plugins=[gate])
    return gate


def _report(
    mutants: list[Mutant], run: list[Mutant], survivors: list[Mutant], equivalent: dict[str, str], modules: list[str], seconds: float
) -> int:
    names = {mutant.name for mutant in mutants}
    ours = {name for name in equivalent if name.split(".")[0] in modules}
    survived = {mutant.name for mutant in survivors}
    counted = [mutant for mutant in run if mutant.name not in equivalent]
    alive = [mutant.name for mutant in counted if mutant.name in survived]
    stale = sorted(name for name in ours if name not in names or (len(run) == len(mutants) and name not in survived))
    for name in alive:
        print(f"survived  {name}")
    for name in stale:
        print(f"stale     {name}  (in {EQUIVALENT.name}, but killed or gone)")
    share = 1 - len(alive) / len(counted) if counted else 1.0
    for module in modules:
        total = [mutant.name for mutant in counted if mutant.module == module]
        print(f"{module:14} {len(total) - sum(name in survived for name in total):4} of {len(total):4} killed")
    print(f"{len(counted) - len(alive)} of {len(counted)} mutants killed ({share:.1%}), {len(ours)} equivalent, {seconds:.0f} s")
    return 0 if share >= REQUIRED_SHARE and not stale else 1


if __name__ == "__main__":
    sys.exit(main())
