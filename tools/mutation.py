"""The mutation gate over `postgrad.formulas`: would the tests notice if a formula were wrong?

    python tools/mutation.py                    run all mutants; exit 1 unless at least 95 % of them are killed
    python tools/mutation.py advantages kl      only these modules
    python tools/mutation.py --list             name the mutants, run nothing
    python tools/mutation.py --recheck          also run the mutants that mutation_equivalent.json calls equivalent

1. One process imports torch, collects tests/formulas once, and notes in a forked child which test calls which function.
2. `mutants.py` makes the mutants: one node of the syntax tree changed.
3. A forked child puts the mutant's code into the live functions and runs the tests that call the mutated function, those of its own
   file first, until one fails (killed) or none does (survived). A child that needs too much processor time counts as killed.
4. `mutation_equivalent.json` names mutants that no test could kill, each with the reason. They are left out of the share, and must exist.

It needs `os.fork` (Linux, macOS) and nothing beyond what the tests need.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import inspect
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import pytest
from mutants import FOLDER, Mutant, module_names, mutants_of, source_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "formulas"
EQUIVALENT = Path(__file__).with_name("mutation_equivalent.json")
REQUIRED_SHARE = 0.95
CPU_SECONDS = 30

# ---- putting a mutant into the live modules --------------------------------------------------------------------------------------


def install(mutant: Mutant, tested: list[ModuleType]) -> None:
    """Gives the live functions the mutant's code, so that every reference to them, in tests too, runs it."""
    constants = _install_tree(mutant.module, mutant.tree(), tested)
    if constants:  # defaults in other modules were evaluated from them
        for module in module_names():
            if module != mutant.module:
                _install_tree(module, source_of(module), tested)


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


# ---- running tests in forked children --------------------------------------------------------------------------------------------


Items = Sequence[pytest.Item]
Callers = list[tuple[int, float]]
"""Tests that call a function: (index, seconds)."""


class Gate:
    """A pytest plugin: collection is pytest's, the run loop is the gate's."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.mutants = mutants
        self.survivors: list[Mutant] = []
        self.ran = False

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate))  # the smallest counterexample is of no interest
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        if session.testsfailed:  # a failed collection is no kill
            return True
        session.config.pluginmanager.unregister(name="terminalreporter")  # the children have nothing to say
        tested = list({item.module for item in items if hasattr(item, "module")})
        callers = self._callers(session, items, tested)
        gc.collect()
        gc.freeze()  # the children share this memory; their collector must not touch it
        if callers is None:
            return True
        for number, mutant in enumerate(self.mutants, 1):
            if _in_child(partial(_survives, mutant, session, _chosen(mutant, callers, items), tested)) == 0:
                self.survivors.append(mutant)
            if sys.stderr.isatty():
                print(f"\r{number}/{len(self.mutants)}, {len(self.survivors)} survived", end="", file=sys.stderr)
        self.ran = True
        return True

    def _callers(self, session: pytest.Session, items: Items, tested: list[ModuleType]) -> defaultdict[str, Callers] | None:
        """For each function the tests that call it, with their seconds. Measured once, in a child, without a mutation."""
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "calls.json"
            if _in_child(lambda: _note_calls(session, items, tested, notes), cpu_seconds=10 * CPU_SECONDS) != 0:
                return None
            callers: defaultdict[str, Callers] = defaultdict(list)
            for index, (names, seconds) in enumerate(json.loads(notes.read_text())):
                for name in [*names, "(module)"]:
                    callers[name].append((index, seconds))
            return callers


def _chosen(mutant: Mutant, callers: dict[str, Callers], items: Items) -> Items:
    """The tests that call the mutated function: those of its own file first, quick ones before slow ones."""
    name = mutant.function if mutant.function == "(module)" else f"{mutant.module}.{mutant.function}"
    own = f"test_{mutant.module}.py"
    ranked = sorted(callers.get(name, ()), key=lambda pair: (items[pair[0]].path.name != own, pair[1]))
    return [items[index] for index, _ in ranked]


def _note_calls(session: pytest.Session, items: Items, tested: list[ModuleType], notes: Path) -> bool:
    """Runs every test without a mutation, after installing the unchanged modules: what fails here is not the mutants' fault."""
    for module in module_names():
        _install_tree(module, source_of(module), tested)
    names: set[str] = set()
    known: dict[CodeType, str | None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
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


def _survives(mutant: Mutant, session: pytest.Session, items: Items, tested: list[ModuleType]) -> bool:
    install(mutant, tested)
    return _passes(session, items)


def _passes(session: pytest.Session, items: Items) -> bool:
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
    parser.add_argument("modules", nargs="*", choices=[*module_names(), []], metavar="module", help="of postgrad.formulas (default: all)")
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    parser.add_argument("--recheck", action="store_true", help="run the listed equivalents as well")
    arguments = parser.parse_args()
    modules = arguments.modules or module_names()
    mutants = [mutant for module in modules for mutant in mutants_of(module)]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    equivalent: dict[str, str] = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    chosen = [mutant for mutant in mutants if arguments.recheck or mutant.name not in equivalent]
    start = time.monotonic()
    gate = _run(chosen)
    if not gate.ran:
        print("the tests fail, or cannot be collected, without any mutation")
        return 1
    return _report(mutants, chosen, gate.survivors, equivalent, modules, time.monotonic() - start)


def _run(mutants: list[Mutant]) -> Gate:
    sys.path.insert(0, str(ROOT / "src"))  # these sources, whatever is installed
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
