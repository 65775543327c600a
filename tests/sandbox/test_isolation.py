"""One rule: bubblewrap, or a refusal, or a loud permission."""

import logging
import subprocess
import sys

import pytest

from postgrad.errors import RecipeError
from postgrad.sandbox import Isolation, bubblewrap, isolation, problem
from postgrad.sandbox.isolation import _Policy, _say_once


def test_where_it_works_it_is_used_also_when_nothing_is_demanded(confined):
    assert isolation() is Isolation.BUBBLEWRAP
    assert isolation(allow_unsafe_exec=True) is Isolation.BUBBLEWRAP


def test_without_bubblewrap_it_is_refused_with_a_hint(no_bwrap):
    with pytest.raises(RecipeError, match=r"no sandbox for code that the model writes: bubblewrap \(bwrap\) is not installed") as raised:
        isolation()
    assert raised.value.exit_code == 2
    assert raised.value.hint is not None
    assert "apt-get install bubblewrap" in raised.value.hint
    assert "allow_unsafe_exec: true" in raised.value.hint


def test_without_bubblewrap_a_permission_is_said_aloud_once(no_bwrap, caplog):
    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert isolation(allow_unsafe_exec=True) is Isolation.NONE
        assert isolation(allow_unsafe_exec=True) is Isolation.NONE
    assert [record.getMessage() for record in caplog.records] == [
        "allow_unsafe_exec: code that the model writes runs WITHOUT a sandbox, with your rights (bubblewrap (bwrap) is not installed)"
    ]


def test_a_permission_holds_for_the_process_it_was_given_to(no_bwrap):
    code = (
        "from postgrad.sandbox import allow_unsafe_exec, isolation\nallow_unsafe_exec()\nprint(isolation())\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "none\n"
    assert not _Policy.unsafe_exec


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("bwrap: setting up uid map: Permission denied", "allow user namespaces"),
        ("bwrap: No permissions to create new namespace", "allow user namespaces"),
        ("bwrap: Unknown option --size", "install bubblewrap 0.8 or newer"),
    ],
)
def test_a_bwrap_that_fails_is_refused_with_what_it_said(monkeypatch, tmp_path, message, hint):
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem.cache_clear()
    try:
        with pytest.raises(RecipeError, match=f"bubblewrap does not work: {message}") as raised:
            isolation()
    finally:
        problem.cache_clear()
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)


def test_other_systems_and_processors_are_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert bubblewrap.missing() == ("bubblewrap needs Linux, this is darwin", "run on Linux")
    monkeypatch.undo()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    found = bubblewrap.missing()
    assert found is not None
    assert "no system call filter for this processor" in found[0]


def test_a_user_id_of_its_own_is_one_that_the_container_maps(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(bubblewrap, "_maps", lambda user_id: True)
    assert bubblewrap.new_user_id() >= 2**30
    monkeypatch.setattr(bubblewrap, "_maps", lambda user_id: user_id < 65536)
    assert 61184 <= bubblewrap.new_user_id() <= 65519
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert bubblewrap.new_user_id() is None
