"""Tools that come with postgrad, by the name that a recipe gives to `use`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from postgrad.errors import RecipeError
from postgrad.rollout import python_tool
from postgrad.rollout.functions import Made, from_object
from postgrad.rollout.items import ToolItem
from postgrad.rollout.reasoning_gym import ReasoningGym
from postgrad.sandbox import Isolation, isolation

_CODE: Mapping[str, Callable[[Isolation], Made]] = {"python": python_tool.stateless, "python_session": python_tool.session}
_CLASSES: Mapping[str, type] = {"reasoning_gym": ReasoningGym}
SHIPPED = (*_CODE, *_CLASSES)


def from_shipped(item: ToolItem, *, allow_unsafe_exec: bool, to_run: bool) -> Made:
    """Raises `RecipeError` where there is no sandbox and that is not allowed, unless the tool is not `to_run`."""
    assert item.use is not None
    if item.isolate is not None:
        raise RecipeError(f"isolate is for functions of yours, and {item.use} is shipped", key="isolate", hint="leave isolate out")
    if item.use in _CLASSES:
        return from_object(_CLASSES[item.use], where=item.use)
    return _CODE[item.use](isolation(allow_unsafe_exec=allow_unsafe_exec) if to_run else Isolation.BUBBLEWRAP)
