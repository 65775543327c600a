"""Fixtures that every test may use."""

from __future__ import annotations

import os
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
