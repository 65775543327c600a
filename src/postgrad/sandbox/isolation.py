"""Whether code that nobody trusts is confined. There is one rule for every tool and reward that runs any:

bubblewrap works here                      → it is used
it does not, `allow_unsafe_exec` is given  → the code runs with the user's rights, which is said aloud
it does not                                → a `RecipeError` with a hint, before anything runs
"""

from __future__ import annotations

import functools
import logging
from enum import StrEnum

from postgrad.errors import RecipeError
from postgrad.sandbox import bubblewrap
from postgrad.sandbox.limits import Limits

log = logging.getLogger(__name__)


class Isolation(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    """Namespaces, a system call filter and limits."""
    NONE = "none"
    """Limits on memory, CPU and file size; the rights of the user who started the run."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the code in it: nothing is known about the code."""


class _Policy:
    unsafe_exec = False


def allow_unsafe_exec() -> None:
    """For the rest of this process, run code without a sandbox where there can be none: the recipe says `allow_unsafe_exec: true`."""
    _Policy.unsafe_exec = True


def isolation(*, allow_unsafe_exec: bool = False) -> Isolation:
    """How code is confined here. Raises `RecipeError` when it cannot be and that is not allowed."""
    found = problem()
    if found is None:
        return Isolation.BUBBLEWRAP
    what, hint = found
    if not (allow_unsafe_exec or _Policy.unsafe_exec):
        raise RecipeError(f"there is no sandbox for code that the model writes: {what}", hint=f"{hint}; {bubblewrap.OR_UNSAFE}")
    _say_once(what)
    return Isolation.NONE


@functools.cache
def _say_once(what: str) -> None:
    log.warning("allow_unsafe_exec: code that the model writes runs WITHOUT a sandbox, with your rights (%s)", what)


@functools.cache
def problem() -> tuple[str, str] | None:
    """(why nothing can be confined here, what to do); None when it can. A process is started and confined to find out, once."""
    from postgrad.sandbox.guest import Guest

    if (found := bubblewrap.missing()) is not None:
        return found
    try:
        with Guest("nothing", {}, isolation=Isolation.BUBBLEWRAP, limits=Limits(cpu_s=10)) as guest:
            guest.wait_ready()
    except SandboxError as error:
        return f"bubblewrap does not work: {error}", _hint(str(error))
    return None


def _hint(message: str) -> str:
    if "--size" in message or "--perms" in message:
        return "install bubblewrap 0.8 or newer"
    return (
        "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; "
        "in a container --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN)"
    )
