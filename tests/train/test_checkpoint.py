"""Checkpoints under SIGKILL, flipped bytes, a full disk and rotation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.errors import CheckpointError, RunError
from postgrad.train import checkpoint


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "trainer.json").write_text("{}")


def test_newest_checkpoint_is_the_one_saved_last(tmp_path):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, write, keep=5)
    found = checkpoint.newest(tmp_path)
    assert found.step == 10
    assert found.skipped == ()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "MANIFEST.json").unlink(), "no MANIFEST.json"),
        (lambda folder: (folder / "MANIFEST.json").write_text('{"a'), "cannot be read"),
        (lambda folder: (folder / "weights.bin").unlink(), "is missing"),
        (lambda folder: (folder / "weights.bin").write_bytes(b"w" * 999), "999 bytes"),
        (lambda folder: _flip(folder / "weights.bin"), "sha256"),
        (lambda folder: [child.unlink() for child in folder.iterdir()], "no MANIFEST.json"),
    ],
)
def test_damaged_newest_checkpoint_is_skipped_and_named(tmp_path, damage, reason):
    checkpoint.save(tmp_path, 1, write, keep=5)
    damage(checkpoint.save(tmp_path, 2, write, keep=5))
    found = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step-000002: ")
    assert reason in found.skipped[0]


def test_no_checkpoint_that_verifies_is_an_error_listing_the_reasons(tmp_path):
    for step in (1, 2):
        _flip(checkpoint.save(tmp_path, step, write, keep=5) / "weights.bin")
    with pytest.raises(CheckpointError, match=r"step-000002.*step-000001") as caught:
        checkpoint.require_newest(tmp_path)
    assert caught.value.exit_code == 5


def test_rotation_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, write, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_rotation_never_removes_the_last_checkpoint_that_verifies(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, write, keep=5)
    for step in (2, 3):
        _flip(checkpoint.folder_of(tmp_path, step) / "weights.bin")
    checkpoint.rotate(tmp_path, keep=1)
    assert checkpoint.newest(tmp_path).step == 1


@pytest.mark.parametrize("point", ["save:after_weights", "save:before_manifest", "save:after_manifest", "save:after_rename"])
def test_sigkill_at_every_point_of_a_save_leaves_a_loadable_checkpoint(tmp_path, point):
    checkpoint.save(tmp_path, 1, write, keep=5)
    code = (
        "import sys; from pathlib import Path; from postgrad.train import checkpoint\n"
        "def write(folder): (folder / 'weights.bin').write_bytes(b'n' * 1000)\n"
        "checkpoint.save(Path(sys.argv[1]), 2, write, keep=5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "POSTGRAD_FAULT": point}, check=False)
    assert done.returncode == -signal.SIGKILL
    found = checkpoint.newest(tmp_path)
    assert found.step == (2 if point == "save:after_rename" else 1)
    assert found.skipped == ()
    checkpoint.clean_temporary(tmp_path)
    assert not list(tmp_path.glob(".tmp-*"))


def test_full_disk_stops_the_run_and_names_the_last_good_checkpoint(tmp_path):
    checkpoint.save(tmp_path, 1, write, keep=5)

    def no_space(folder: Path) -> None:
        write(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="no space left") as caught:
        checkpoint.save(tmp_path, 2, no_space, keep=5)
    assert caught.value.hint is not None
    assert "free some disk space" in caught.value.hint
    assert "step-000001" in caught.value.hint
    assert checkpoint.newest(tmp_path).step == 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_folder_that_was_removed_is_not_taken_for_a_full_disk(tmp_path):
    def removed(folder: Path) -> None:
        shutil.rmtree(folder)
        write(folder)

    with pytest.raises(RunError, match="no such file") as caught:
        checkpoint.save(tmp_path, 1, removed, keep=5)
    assert "still there" in str(caught.value.hint)


def test_planted_pickle_is_never_opened(tmp_path):
    folder = checkpoint.save(tmp_path, 1, write, keep=5)
    (folder / "rng_state.pth").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert checkpoint.newest(tmp_path).step == 1


def test_steps_are_ordered_as_numbers_and_copies_are_left_alone(tmp_path):
    """By name, step-1000000 sorts before step-999999 and would be rotated away as the oldest."""
    for step in (999998, 999999, 1000000, 1000001):
        checkpoint.save(tmp_path, step, lambda folder: (folder / "w").write_text("x"), keep=2)
    shutil.copytree(tmp_path / "step-1000000", tmp_path / "step-1000000-backup")
    assert checkpoint.newest(tmp_path).step == 1000001
    checkpoint.save(tmp_path, 1000002, lambda folder: (folder / "w").write_text("x"), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000-backup", "step-1000001", "step-1000002"]


def test_a_full_disk_as_safetensors_reports_it_names_the_last_good_checkpoint(tmp_path):
    from safetensors import SafetensorError

    checkpoint.save(tmp_path, 1, lambda folder: (folder / "w").write_text("x"), keep=2)

    def full(folder):
        raise SafetensorError("No space left on device")

    with pytest.raises(RunError, match="cannot be written") as error:
        checkpoint.save(tmp_path, 2, full, keep=2)
    assert "step-000001" in str(error.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
