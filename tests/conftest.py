"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data files, outside the repository; tests that want it are skipped where it is absent."""
    folder = Path(os.environ.get("POSTGRAD_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip("no shared data beside the checkout (POSTGRAD_SHARED)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker takes whole files, and one that begins a long file last would end long after the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def no_bwrap(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which bubblewrap is not installed, for this process and those that it starts."""
    from postgrad.sandbox import problem

    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("nothing")))
    problem.cache_clear()
    yield
    problem.cache_clear()
