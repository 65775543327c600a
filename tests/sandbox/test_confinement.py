"""What code in the sandbox cannot do, tried with real processes."""

import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from postgrad.sandbox import Limits, seccomp
from postgrad.sandbox.interpreter import Ended, Interpreter, TooSlow

TRY = """
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__
"""


def test_there_is_no_network_out_no_loopback_of_the_host_and_no_names(inside):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""{TRY}
import socket
def connect(host, port):
    socket.create_connection((host, port), timeout=2)
    return "connected"
[attempt(connect, "127.0.0.1", {port}), attempt(connect, "1.1.1.1", 53), attempt(socket.gethostbyname, "example.com"),
 attempt(connect, "169.254.169.254", 80), attempt(socket.socket, 40, 1), attempt(socket.socket, 16, 3)]"""
        assert inside(code).value == "['ConnectionRefusedError', 'OSError', 'gaierror', 'OSError', 'OSError', 'OSError']"


def test_a_server_of_its_own_works(inside):
    code = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hello")).start()
socket.create_connection(server.getsockname()).recv(5)"""
    assert inside(code).value == "b'hello'"


def test_unix_sockets_of_the_host_are_not_there(inside, tmp_path):
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(tmp_path / "s"))
        abstract.bind("\0postgrad-test-socket")
        for server in (named, abstract):
            server.listen()
        code = f"""{TRY}
import socket
def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)
    return "connected"
[attempt(connect, {str(tmp_path / "s")!r}), attempt(connect, "\\0postgrad-test-socket")]"""
        assert inside(code).value == "['FileNotFoundError', 'ConnectionRefusedError']"


def test_there_are_no_secrets(inside, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    home = Path.home()
    key = home / ".ssh" / "id_of_a_test"
    made = not key.parent.exists()
    key.parent.mkdir(exist_ok=True)
    key.write_text("hunter2")
    try:
        code = f"""{TRY}
import os
paths = [{str(secret)!r}, {str(key)!r}, "/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/run", "/var", "/sys"]
[[os.path.lexists(path) for path in paths], attempt(os.listdir, {str(key.parent)!r}), sorted(os.environ)]"""
        found = inside(code).value
    finally:
        key.unlink()
        if made:
            key.parent.rmdir()
    names = ["HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"]
    assert re.sub(r"'(PWD|LC_CTYPE)', ", "", found) == str([[False] * 9, "FileNotFoundError", names])


def test_the_runs_own_folder_is_not_visible(inside):
    here = str(Path(__file__).parent)
    assert inside(f"import os; os.path.exists({here!r})").value == "False"


def test_only_the_working_folder_can_be_written(inside):
    """Files that exist are opened without being changed: where this fails, nothing is broken by it."""
    code = f"""{TRY}
import os, sys
open("note", "w").write("mine")
[attempt(os.mkdir, folder + "/postgrad-test") for folder in ("", "/usr", "/dev", "/etc", "/sandbox", sys.prefix)
] + [attempt(open, path, "r+") for path in ("/sandbox/inside/start.py", os.__file__)] + [open("note").read(), os.listdir(".")]"""
    value = inside(code).value
    assert len(re.findall(r"'(OSError|PermissionError)'", value)) == 8
    assert value.endswith("'mine', ['note']]")


def test_links_and_dots_lead_nowhere(inside, tmp_path):
    target = tmp_path / "target"
    target.write_text("untouched")
    code = f"""{TRY}
import os
os.symlink({str(target)!r}, "link")
os.symlink("/", "root")
[attempt(open, "link"), attempt(open, "../../../../../..{target}"), attempt(open, "root{target}", "r+"),
 attempt(os.link, "/etc/ld.so.cache", "x"), attempt(os.mknod, "device", 0o600 | 0o060000, os.makedev(254, 0)), attempt(os.chroot, ".")]"""
    value = inside(code).value
    assert value == "['FileNotFoundError', 'FileNotFoundError', 'FileNotFoundError', 'OSError', 'PermissionError', 'PermissionError']"
    assert target.read_text() == "untouched"


def test_nothing_is_left_for_the_next_one(inside):
    inside("open('/tmp/left', 'w').write('x'); open('left', 'w').write('x')")
    assert inside("import os; [os.path.exists('/tmp/left'), os.listdir('.')]").value == "[False, []]"


def test_a_fork_bomb_stays_small_and_dies(confined):
    name = f"bomb{os.getpid()}"
    bomb = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, {name.encode()!r})  # PR_SET_NAME: a child has its parent's
while True:
    try:
        os.fork()
    except OSError:
        pass"""
    interpreter = Interpreter(isolation=confined, limits=Limits(cpu_s=20, processes=8))
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        exploding = pool.submit(interpreter.run, bomb, deadline_s=1.0)
        counts = []
        while not exploding.done():
            counts.append(count_named(name))
            time.sleep(0.02)
        with pytest.raises(TooSlow):
            exploding.result()
    assert time.monotonic() - began < 2.0
    assert 2 <= max(counts) <= 8
    assert settled(lambda: count_named(name) == 0)


def test_processes_and_threads_are_counted_together(inside):
    code = """
import threading, time
count = 0
try:
    while count < 100:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
count"""
    assert 0 < int(inside(code, processes=8).value) < 8


def test_a_memory_bomb_is_an_error_of_the_code(inside):
    for bomb in ("x = bytearray(10**10)", "x = []\nwhile True:\n    x.append('y' * 10**6)", "x = 'a' * 2**40"):
        assert inside(bomb, memory_mb=128).error.splitlines()[-1].startswith("MemoryError")


def test_memory_that_no_process_counts_cannot_be_had(inside):
    code = f"""{TRY}
import os, ctypes
library = ctypes.CDLL(None, use_errno=True)
[attempt(os.memfd_create, "x"), library.shmget(0, 10**9, 0o1600), ctypes.get_errno()]"""
    assert inside(code).value == "['PermissionError', -1, 1]"


def test_the_disk_has_a_size(inside):
    code = """
written = 0
try:
    for number in range(1000):
        with open(f"file{number}", "wb") as file:
            written += file.write(bytes(2**20))
except OSError as error:
    print(error.strerror)
written // 2**20"""
    cell = inside(code, disk_mb=8)
    assert cell.printed == "No space left on device\n"
    assert int(cell.value) <= 8
    for folder in ("/dev/shm", "/"):
        assert "Error" in inside(f"open('{folder}/big', 'wb').write(bytes(2**24))", disk_mb=32).error


def test_a_file_has_a_size(inside):
    with pytest.raises(Ended):
        inside("import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); open('big', 'wb').write(bytes(2**24))", disk_mb=2)


DEAF = """
import signal, time
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
while True:
    time.sleep(1)"""


@pytest.mark.parametrize("loop", ["while True: pass", DEAF, "import re; re.match('(a+)+$', 'a' * 40 + 'b')"])
def test_an_endless_loop_is_killed_within_a_second_of_its_deadline(confined, loop):
    interpreter = Interpreter(isolation=confined, limits=Limits(cpu_s=20))
    began = time.monotonic()
    with pytest.raises(TooSlow):
        interpreter.run(loop, deadline_s=0.5)
    assert time.monotonic() - began < 1.5


def test_processor_time_has_a_limit_of_its_own(inside):
    with pytest.raises(Ended) as raised:
        inside("while True: pass", cpu_s=0.5)
    assert raised.value.code == 128 + 9


def test_a_child_that_left_its_session_dies_with_the_sandbox(inside, confined):
    mark = f"postgrad-test-{os.getpid()}-{time.monotonic_ns()}"
    daemon = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
    os._exit(0)
import time; time.sleep(0.2)"""
    interpreter = Interpreter(isolation=confined, limits=Limits(cpu_s=20))
    interpreter.run(daemon, deadline_s=20)
    assert settled(lambda: runs(mark))
    interpreter.close()
    assert settled(lambda: not runs(mark))


def test_the_sandbox_dies_with_the_process_that_made_it(confined):
    mark = f"postgrad-test-{os.getpid()}-{time.monotonic_ns()}"
    owner = f"""
import os, signal, sys
from postgrad.sandbox import Limits, isolation
from postgrad.sandbox.interpreter import Interpreter
interpreter = Interpreter(isolation=isolation(), limits=Limits(cpu_s=60))
interpreter.run("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])", deadline_s=20)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)"""
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, check=False)
    assert done.stdout == "ready\n", done.stderr
    assert settled(lambda: not runs(mark))


def test_an_interpreter_outlives_the_thread_that_made_it(confined):
    import threading

    made = []
    thread = threading.Thread(target=lambda: made.append(Interpreter(isolation=confined, limits=Limits(cpu_s=20))))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert made[0].run("1 + 1", deadline_s=20).value == "2"
    made[0].close()


def test_other_processes_are_neither_seen_nor_reached(inside):
    code = f"""{TRY}
import os
[os.getpid() < 10, attempt(os.kill, {os.getpid()}, 0), os.path.exists("/proc/{os.getpid()}")]"""
    assert inside(code).value == "[True, 'ProcessLookupError', False]"
    os.kill(os.getpid(), 0)


def test_it_has_no_rights_and_can_get_none(inside):
    code = f"""{TRY}
import os, ctypes
library = ctypes.CDLL(None, use_errno=True)
def refused(result):
    return result == -1 and ctypes.get_errno()
[os.getuid() != 0 or {os.getuid()}, attempt(os.setuid, 0), attempt(os.setgroups, [0]), refused(library.unshare(0x10000000)),
 refused(library.ptrace(16, 1, 0, 0)), refused(library.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, 0)), os.getgroups() in ([], [65534])]"""
    assert inside(code).value in (
        "[True, 'PermissionError', 'PermissionError', 1, 1, 1, True]",
        "[True, 'OSError', 'PermissionError', 1, 1, 1, True]",
    )


def test_the_machine_ends_the_sandbox_and_not_the_run_when_memory_runs_out(confined):
    interpreter = Interpreter(isolation=confined, limits=Limits(cpu_s=20))
    pid = interpreter._guest._process.pid
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    interpreter.close()


REFUSED = """ptrace process_vm_readv process_vm_writev memfd_create shmget msgget semget mq_open userfaultfd bpf perf_event_open keyctl
add_key request_key unshare setns mount umount2 pivot_root chroot open_by_handle_at name_to_handle_at kexec_load kcmp"""
COMMON = "io_uring_setup open_tree move_mount fsopen fsconfig fsmount fspick pidfd_getfd mount_setattr memfd_secret"


@pytest.mark.skipif(not Path("/usr/include/asm-generic/unistd.h").exists(), reason="the kernel's headers are not installed")
def test_the_system_calls_have_the_numbers_of_the_kernels_headers():
    headers = {"aarch64": "/usr/include/asm-generic/unistd.h"}
    if platform.machine() == "x86_64":
        headers["x86_64"] = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    for machine, path in headers.items():
        if not Path(path).exists():
            continue
        numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(path).read_text()))
        known = seccomp._MACHINES[machine]
        assert [int(numbers[name]) for name in REFUSED.split()] == list(known.refused), machine
        assert [int(numbers[name]) for name in COMMON.split()] == list(seccomp._COMMON), machine
        assert [int(numbers[name]) for name in ("clone", "socket", "clone3")] == [known.clone, known.socket, seccomp._CLONE3]


def count_named(name):
    """Processes of this name: other tests start and end theirs at the same time."""
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            count += Path(f"/proc/{entry}/comm").read_text() == f"{name}\n"
    return count


def runs(mark):
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in command:
            return True
    return False


def settled(condition, *, seconds=3.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
