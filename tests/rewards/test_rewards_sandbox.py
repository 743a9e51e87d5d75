"""Hostile programs in a real sandbox.

They score 0 within their limits and change nothing outside. All bombs are small.
"""

import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from msrl.errors import ManyErrors, MsrlError
from msrl.rewards import sandbox, sandbox_init
from msrl.rewards.rows import RowSources
from msrl.rewards.sandbox import Limits, run
from msrl.rewards.score import Scorer, Source
from msrl.rewards.verifiers import code
from reward_groups import group, totals
from support import assert_mentions, mentions, wait_until
from training_runs import children

SMALL = Limits(case_s=1.0, total_s=4.0, memory_bytes=96 << 20, processes=8)
# For programs that must end by themselves, also on busy cores.
AMPLE = replace(SMALL, case_s=20.0, total_s=60.0)
needs_namespaces = pytest.mark.skipif(sandbox.refusal() is not None, reason=str(sandbox.refusal()))


def run_program(program, stdin="", limits=AMPLE):
    (case,) = run(program, [stdin], limits)
    return case


@pytest.fixture(scope="module", autouse=True)
def adopts_orphans():
    """Make this process adopt orphans, so that `inside` sees all processes of a sandbox."""
    set_child_subreaper, libc = 36, ctypes.CDLL(None)  # prctl(2)
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def inside():
    """Return the ids of the processes of this process's sandboxes, including launchers."""
    programs = ("/sandbox/program.py", "sandbox_init.py")
    commands = children(os.getpid()).items()
    return [pid for pid, command in commands if any(each in command for each in programs)]


@needs_namespaces
def test_a_program_reads_its_input_and_each_case_is_a_separate_run():
    cases = run(
        "import sys\nn = int(input())\nprint(n * n)\nsys.exit(n == 3)", ["2", "3", "4"], AMPLE
    )
    assert [(c.status, c.stdout) for c in cases] == [
        ("ok", "4\n"),
        ("error", "9\n"),
        ("ok", "16\n"),
    ]
    assert [c.status for c in run("1 / int(input())", ["1", "0", "1"], AMPLE, stop=True)] == [
        "ok",
        "error",
    ]
    assert "ZeroDivisionError" in run_program("1/0").stderr
    assert (
        run_program("import sys; print(len(sys.stdin.read()))", "x" * (10 << 20)).stdout
        == f"{10 << 20}\n"
    )
    assert run_program("import math, json, decimal, collections, heapq; print('é')").stdout == "é\n"


def test_all_output_of_a_program_before_its_end_is_read():
    out, program = os.pipe()
    fcntl.fcntl(program, fcntl.F_SETPIPE_SZ, 1 << 20)  # the size of a pipe with pages of 64 KiB
    os.write(program, b"x" * 500_000)
    os.close(program)
    output = {out: b""}
    sandbox_init._drain(output)
    os.close(out)
    assert output[out] == b"x" * 500_000


BOMBS = {
    "fork": "import os\nwhile True:\n    try:\n"
    "        os.fork()\n    except OSError:\n        pass",
    "spin": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory of many": "import os\nfor _ in range(3): os.fork()\n"
    "x = bytearray(b'x' * (30 << 20))\nwhile True: pass",
    "output": "while True: print('x' * 10000)",
    "errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "closed output": "import os\nos.close(1); os.close(2)\nwhile True: pass",
    "files": "for n in range(10**6):\n    open(f'/tmp/{n}', 'wb').write(b'x' * 100000)",
    "one file": "f = open('/tmp/a', 'wb')\nwhile True: f.write(b'x' * 100000)",
    "threads": "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "signals": "import signal\nfor n in set(range(1, 32)) - {9, 19}:\n"
    "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "kill all": "import os\ntry:\n    os.kill(-1, 9)\nexcept OSError: pass\n"
    "os.kill(1, 15); os.kill(1, 9)\nraise SystemExit(3)",
    "interrupt the first process": "import os, time\nos.kill(1, 2)\ntime.sleep(60)",
    "shared memory": "import ctypes\n"
    "raise SystemExit(ctypes.CDLL(None).memfd_create(b'a', 0) == -1)",
    "deep recursion": "def f(): return f()\nimport sys; sys.setrecursionlimit(10**9); f()",
}


@needs_namespaces
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fork", "output") else pytest.mark.slow)
        for name in BOMBS
    ],
)
def test_a_fork_bomb_ends_at_its_limits_with_all_its_processes(name):
    start = time.monotonic()
    case = run_program(BOMBS[name], limits=SMALL)
    assert time.monotonic() - start < 40
    assert case.status != "ok"
    assert len(case.stdout) <= SMALL.output_bytes
    assert inside() == []


# Memory that is not among the resident pages of a process with a known id.
HIDDEN_MEMORY = {
    "of a thread without the first one": "import ctypes, os, threading, time\n"
    "os.fork(); os.fork()\ndef hold():\n    x = bytearray(b'x' * (30 << 20)); time.sleep(60)\n"
    "threading.Thread(target=hold).start()\nctypes.CDLL(None).pthread_exit(None)",
    "of connections that nobody accepts": "import socket\nserver = socket.socket(socket.AF_UNIX)\n"
    "server.bind('/tmp/s'); server.listen(4096)\nwhile True:\n"
    "    client = socket.socket(socket.AF_UNIX); client.connect('/tmp/s')\n"
    "    client.setblocking(False); client.send(b'x' * 100_000); client.close()",
    "of closed senders": "import socket, time\nkeep = []\nfor n in range(50):\n"
    "    keep.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))\n"
    "    keep[-1].bind(f'/tmp/{n}')\n"
    "    for _ in range(10):\n        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "        sender.sendto(b'x' * 100_000, f'/tmp/{n}'); sender.close()\ntime.sleep(60)",
}


@needs_namespaces
@pytest.mark.parametrize("kind", HIDDEN_MEMORY)
def test_memory_of_any_kind_counts_to_the_limit_of_all_processes(kind):
    assert run_program(HIDDEN_MEMORY[kind], limits=replace(AMPLE, processes=12)).status == "memory"
    assert inside() == []


def test_a_pipe_counts_once_whatever_its_path_and_owners(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before = sandbox_init._pipes("/proc/thread-self/fd")
    files = [*os.pipe(), os.open(tmp_path / "fifo", os.O_RDWR)]
    (tmp_path / "fifo").unlink()
    files.append(os.dup(files[0]))
    assert len(sandbox_init._pipes("/proc/thread-self/fd") - before) == 2
    for number in files:
        os.close(number)


@needs_namespaces
def test_memory_that_belongs_to_no_process_cannot_be_made():
    program = """
import ctypes, fcntl, mmap, os, socket
libc = ctypes.CDLL(None)
a, b = socket.socketpair()
attempts = {
    "shared map": lambda: mmap.mmap(-1, 1 << 20),
    "device": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20),
    "memfd": lambda: os.memfd_create("a"),
    "pipe": lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20),
    "socket": lambda: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20),
    "files": lambda: open("/dev/shm/a", "wb").write(b"x" * (9 << 20)),
    "input": lambda: os.write(0, b"x"),
    "longer input": lambda: os.ftruncate(os.open("/proc/self/fd/0", os.O_RDWR), 1 << 20),
    "rules": lambda: 1 / (libc.syscall(444, None, 0, 1) + 1),  # landlock_create_ruleset
}
for name in ("vmsplice", "shmget", "inotify_init1", "inotify_init"):
    attempts[name] = lambda name=name: 1 / (getattr(libc, name)(1, 1, 1, 0) + 1)
attempts["huge pages"] = lambda: 1 / (libc.prctl(41, 0, 0, 0, 0) + 1)
for name, attempt in attempts.items():
    try:
        attempt(); print(name)
    except (OSError, ZeroDivisionError): pass
print("end")
"""
    assert run_program(program).stdout == "end\n"


@needs_namespaces
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_correct_program_may_use_processes_and_share_memory(method):
    program = f"""
import asyncio, mmap, multiprocessing, sqlite3, sys
from multiprocessing import shared_memory
def square(x): return x * x
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with context.Pool(3) as pool: print(sum(pool.map(square, range(10))))
    array, queue = context.Array("i", 1000), context.Queue()
    array[3] = 5; queue.put(array[3]); print(queue.get())
    shared = shared_memory.SharedMemory(create=True, size=1 << 20)
    shared.buf[0] = 7; print(shared.buf[0]); shared.close(); shared.unlink()
    print(asyncio.run(asyncio.sleep(0.01, 9)), mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline())
    sqlite3.connect("/tmp/a").execute("create table t (x)")
"""
    case = run_program(program, "hi\n", replace(AMPLE, memory_bytes=256 << 20, processes=16))
    assert case == sandbox.Case("ok", "285\n5\n7\n9 b'hi\\n'\n")


def memory_groups():
    """Return the folders of sandboxes in the parent of this process's cgroup; None without one."""
    rows = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((row[3:] for row in rows if row.startswith("0::")), "/")
    parent = Path(f"{sandbox_init.CGROUPS}{own}").parent if own != "/" else Path("/sys/fs/cgroup")
    control = parent / "cgroup.subtree_control"
    has_memory = control.is_file() and "memory" in control.read_text().split()
    return [*parent.glob("msrl-sandbox-*")] if has_memory and os.access(parent, os.W_OK) else None


@needs_namespaces
@pytest.mark.skipif(memory_groups() is None, reason="no memory cgroup (v2) may be created here")
def test_a_program_has_a_memory_cgroup_that_ends_with_it():
    assert "/msrl-sandbox-" in run_program("print(open('/proc/self/cgroup').read())").stdout
    assert run_program(BOMBS["memory of many"], limits=AMPLE).status == "memory"
    assert memory_groups() == []


@needs_namespaces
def test_a_daemon_ends_with_the_case_that_started_it():
    daemon = (
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
    )
    start = time.monotonic()
    first, second = run(
        daemon + "print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 5)", ["", ""], AMPLE
    )
    assert (first.stdout, second.stdout) == ("True\n", "True\n")
    assert time.monotonic() - start < 20  # it sleeps for 60 s
    assert inside() == []


@needs_namespaces
def test_a_program_cannot_limit_the_process_that_watches_it():
    """The kernel asks for no right but the same user, and the process could not watch any more."""
    program = """
import os, resource
own = resource.prlimit(0, resource.RLIMIT_NOFILE, (32, 32))
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
for kind in range(16):
    for other in (1, os.getppid(), -1):
        try:
            resource.prlimit(other, kind, (0, 0)); print(kind, other)
        except PermissionError: pass
        try:
            os.setpriority(os.PRIO_PROCESS, 1, 19); print("priority")
        except PermissionError: pass
print(own == (64, 64), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    case = run_program(program)
    assert (case.status, case.stdout) == ("ok", "True (32, 32)\n"), case


@needs_namespaces
def test_nothing_of_the_machine_can_be_changed_or_seen(tmp_path):
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    treasure.chmod(0o666)
    tmp_path.chmod(0o777)
    attack = f"""
import os, pathlib
done = []
def attempt(name, action):
    try:
        action(); done.append(name)
    except (OSError, ImportError): pass
attempt("delete", lambda: os.remove({str(treasure)!r}))
attempt("read", lambda: open({str(treasure)!r}).read())
attempt("write in /usr", lambda: open("/usr/x", "w"))
attempt("write in /", lambda: open("/x", "w"))
attempt("write in /sandbox", lambda: open("/sandbox/program.py", "w"))
attempt("write in Python", lambda: open(os.path.dirname(os.__file__) + "/x", "w"))
attempt("see passwords", lambda: open("/etc/shadow").read())
attempt("see the folder", lambda: os.listdir({str(tmp_path)!r}))
attempt("trace the first process", lambda: open("/proc/1/mem", "rb"))
attempt("its files", lambda: os.listdir("/proc/1/fd"))
attempt("change the kernel", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w"))
attempt("become root", lambda: os.setuid(0))
attempt("a device", lambda: os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0)))
attempt("root's folder", lambda: os.chroot("/tmp"))
import ctypes
libc = ctypes.CDLL(None)
if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0: done.append("mount")
if libc.unshare(0x10000000) == 0: done.append("unshare")
print(done, os.environ.get("SECRET"), os.getuid() != 0)
"""
    os.environ["SECRET"] = "hidden"
    try:
        assert run_program(attack).stdout == "[] None True\n"
    finally:
        del os.environ["SECRET"]
    assert treasure.read_text() == "gold"


@needs_namespaces
def test_a_python_below_tmp_is_seen_read_only_and_nothing_beside_it():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "treasure").write_text("gold")
        own = Path(folder) / "clone" / "venv"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(own)], check=True, timeout=60
        )
        program = f"""
import os, sys
is_visible = os.listdir("/tmp") == [{Path(folder).name!r}]
print(sys.prefix == {str(own)!r}, is_visible, os.listdir({folder!r}))
open("/tmp/a", "w").write("mine")
attempts = [lambda: os.rename({folder!r}, "/tmp/b")]
attempts.append(lambda: os.rename({str(own.parent)!r}, {folder!r} + "/b"))
attempts.append(lambda: os.remove(sys.executable))
attempts.append(lambda: open({str(own / "pyvenv.cfg")!r}, "w"))
attempts += [lambda: os.mkdir({folder!r} + "/c"), lambda: os.chmod({folder!r}, 0o777)]
for attempt in attempts:
    try:
        attempt(); print("changed")
    except OSError: pass
"""
        (case,) = run(program, [""], AMPLE, python=str(own / "bin" / "python"))
        assert (case.stdout, case.stderr) == ("True True ['clone']\n", "")


@needs_namespaces
def test_a_python_behind_links_is_found_and_no_link_is_followed_into_the_machine(tmp_path):
    base, own = tmp_path / "base", tmp_path / "own"
    base.symlink_to(sys.base_prefix)  # as uv names its interpreters
    python = str(base / "bin" / Path(sys.executable).resolve().name)
    subprocess.run([python, "-m", "venv", "--without-pip", str(own)], check=True, timeout=60)
    (tmp_path / "link").symlink_to("own")
    before = sorted(own.rglob("*"))
    (case,) = run(
        "import sys, decimal; print(sys.prefix)",
        [""],
        AMPLE,
        python=str(tmp_path / "link" / "bin" / "python"),
    )
    assert (case.stdout, case.stderr) == (f"{tmp_path / 'link'}\n", "")
    assert sorted(own.rglob("*")) == before


@needs_namespaces
@pytest.mark.parametrize("python", ["/usr/bin/python3", "/bin/python3"])
def test_programs_have_another_python_than_this_one(python):
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    assert (
        run_with(python, "import sys, json; print(sys.executable, input())", "é") == f"{python} é\n"
    )


def run_with(python, program, stdin):
    (case,) = run(program, [stdin], AMPLE, python=python)
    return case.stdout


@needs_namespaces
def test_there_is_no_network_not_even_to_this_machine(tmp_path):
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind(str(tmp_path / "socket"))
        local.listen()
        (tmp_path / "socket").chmod(0o777)
        program = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_UNIX, {str(tmp_path / "socket")!r}),
):
    try:
        socket.socket(family).connect(address); print("connected", address)
    except OSError: pass
"""
        assert run_program(program) == sandbox.Case("ok", "")


@needs_namespaces
def test_only_local_and_internet_sockets_exist_and_they_have_no_network():
    """Families that a network namespace does not confine, such as vsock (40), are refused."""
    program = """
import errno, socket
made = []
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
            made.append(family)
        except OSError as error:
            names = ("EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")
            assert error.errno in {getattr(errno, name) for name in names}, (family, error)
try:
    socket.socketpair(40)
except OSError as error:
    print(error.errno == errno.EAFNOSUPPORT, sorted(set(made)))
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
"""
    (case,) = run(program, [""], AMPLE)
    first, second = case.stdout.splitlines()
    assert first in ("True [1, 2]", "True [1, 2, 10]") and second == "b'x'", case


@needs_namespaces
@pytest.mark.slow
def test_a_sandbox_ends_with_the_process_that_started_it():
    code = (
        "from msrl.rewards.sandbox import Limits, run; import os, threading, time, signal\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "limits = Limits(case_s=50.0, total_s=50.0)\n"
        "run('import os, time\\nos.fork()\\ntime.sleep(60)', [''], limits)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    wait_until(lambda: not inside())


STDIN = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [3, [3, 4]]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add([3], [4]) == [3, 4]"])
ADD = "def add(a, b):\n    return a + b\n"


def fence(program):
    return f"<think>```python\nwrong\n```</think>\n```python\n{program}\n```"


@pytest.mark.sample(4)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "answer", "score", "share"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", STDIN, 1.0, 1.0),
        ("print(3)", STDIN, 0.0, 0.5),
        ("print(input())", STDIN, 0.0, 0.0),
        (ADD, CALLS, 1.0, 1.0),
        (
            "class Solution:\n    def add(self, a, b):\n"
            "        print('noise')\n        return a + b",
            CALLS,
            1.0,
            1.0,
        ),
        ("def add(a, b): return 3", CALLS, 0.0, 0.5),
        (ADD, ASSERTS, 1.0, 1.0),
        ("def add(a, b): return 3", ASSERTS, 0.0, 0.5),
        (ADD, "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'", 1.0, 1.0),
        (ADD, json.dumps({"tests": "assert add(1, 2) == 4"}), 0.0, 0.0),
        (ADD + "def compile(text): pass\nexec = globals = getattr = None", ASSERTS, 1.0, 1.0),
        (
            "class Solution:\n    add = lambda self, a, b: a + b\nglobals = getattr = None",
            CALLS,
            1.0,
            1.0,
        ),
        ("import sys; sys.exit(0)", ASSERTS, 0.0, 0.0),
        ("import os; os._exit(0)", ASSERTS, 0.0, 0.0),
        ("import os; os._exit(0)", CALLS, 0.0, 0.0),
        ("import os; os.write(1, b'[' * 100_000); os._exit(0)", CALLS, 0.0, 0.0),
        (ADD + "print('noise')", ASSERTS, 1.0, 1.0),
        ("def add(a, b): return a +", ASSERTS, 0.0, 0.0),
    ],
)
def test_a_program_is_scored_by_its_tests(program, answer, score, share):
    assert code.score(fence(program), answer) == score
    assert code.score(fence(program), answer, partial=True) == share


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```cpp\nint main() {}\n```\nIn Python:\n```python\nprint(1)\n```", "print(1)\n"),
        (
            "```bash\npip\n```\n```Python3 title=a\nprint(1)\n```\nIt prints\n```text\n1\n```\n",
            "print(1)\n",
        ),
        ("Use ```print``` or\n``` py\nprint(1)```", "print(1)"),
        ("```python\r\nprint(1)\r\n```", "print(1)\r\n"),
        ("```python\nprint(1)\n```\nmore\n```\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        (
            "```python\nprint(1)\n```\nOutput:\n```\n"
            "x = 3\nhello world\n```\nand\n```\n[1, 2]\n```",
            "print(1)\n",
        ),
        ("```\nx = 3\n```\nor\n```\ny = 3\n```", "y = 3\n"),
        ("``` c\nint x;\n```\n```python\ncut", None),
    ],
)
def test_the_program_is_the_last_block_of_python_among_blocks_of_other_languages(response, program):
    assert code.last_program(response) == program


@needs_namespaces
def test_options_of_code_and_responses_without_a_program():
    assert code.score("print(3)", STDIN) == 0.0
    assert code.score(fence("print(3)"), STDIN, max_cases=1) == 1.0
    answer = json.dumps({"inputs": [""], "outputs": ["0.333333 a"]})
    assert code.score(fence("print(1/3, 'a')"), answer) == 0.0
    assert code.score(fence("print(1/3, 'a')"), answer, tolerance=1e-3) == 1.0


@needs_namespaces
@pytest.mark.slow
def test_hostile_completions_are_scored_in_the_pool_and_the_next_ones_too():
    hostile = [fence(BOMBS[name]) for name in ("fork", "memory", "output", "signals")]
    options = {"case_s": 10.0, "total_s": 20.0, "memory_mb": 96, "processes": 8}
    with Scorer([Source(verifier="code", options=options, timeout_s=60.0)], 2) as scorer:
        scores = scorer.score(
            [group(*hostile, fence(ADD), answer=ASSERTS), group(fence(ADD), answer=ASSERTS)]
        )
    assert totals(scores) == [[0.0] * 4 + [1.0], [1.0]]
    assert scores.failures == {}


def test_without_namespaces_code_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sandbox, "refusal", lambda python: "no namespaces: unshare: refused")
    with pytest.raises(
        ManyErrors,
        match=mentions(
            "reward.sources[0].verifier=code: ", "no namespaces: unshare: refused", "options.url"
        ),
    ):
        Scorer([Source(verifier="code")], 1)
    assert code.refusal(url="https://sandbox:8080") is None
    assert_mentions(code.refusal(url="sandbox"), "http")
    assert "positive" in str(code.refusal(case_s=0.0))


@needs_namespaces
def test_sandboxes_run_side_by_side():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run_program("print(1)").stdout))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == ["1\n"] * 4


ALWAYS_EQUAL = "class Any:\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
CHEATS = {
    "echo the first line": "print(input())\nimport sys; sys.exit(0)",
    "echo all lines": "import sys, os\n"
    "sys.stdout.write(sys.stdin.read().split('\\n')[0]); sys.stdout.flush(); os._exit(0)",
    "echo the descriptor": "import os\nos.write(1, os.read(0, 100)[:32]); os._exit(0)",
    "patch exec": "import builtins\nbuiltins.exec = lambda *_: None\nbuiltins.eval = builtins.exec",
    "patch compile": "import builtins\nbuiltins.compile = lambda *_, **__: ''\n"
    "import ast; ast.parse = lambda *_: None",
    "patch AssertionError": "import builtins\nbuiltins.AssertionError = None\n"
    "def add(a, b): return 0",
    "equal everything": ALWAYS_EQUAL + "def add(a, b): return Any()",
    "equal everything inside a list": ALWAYS_EQUAL
    + "def add(a, b): return [Any(), Any()] if isinstance(a, list) else Any()",
    "mock": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a number that is equal": "class Any(int):\n    __eq__ = lambda self, other: True\n"
    "def add(a, b): return Any()",
    "a comparison that names a library": "def eq(self, other): return True\n"
    "eq.__module__ = 'numpy'\nclass Any: __eq__ = eq\ndef add(a, b): return Any()",
    "a metaclass that lies": "class Meta(type):\n"
    "    def __getattribute__(cls, name): return int.__eq__ if name == '__eq__' else "
    "type.__getattribute__(cls, name)\n"
    "class Any(metaclass=Meta):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Any()",
    "a list that hides its items": ALWAYS_EQUAL
    + "class Items(list):\n    __iter__ = lambda self: iter(())\n"
    "def add(a, b): return Items([Any(), Any()]) if isinstance(a, list) else Any()",
    "a fraction of equal parts": ALWAYS_EQUAL + "from fractions import Fraction\n"
    "def add(a, b):\n    f = Fraction(1); f._numerator = f._denominator = Any(); return f",
    "a mapping of equal items": ALWAYS_EQUAL + "from collections import UserList\n"
    "def add(a, b): return UserList([Any(), Any()])",
    "a class that is not int": "class Any:\n    __class__ = int\n"
    "    __eq__ = lambda self, other: True\ndef add(a, b): return Any()",
    "return the expected value of a caller": "import sys\ndef add(a, b):\n"
    "    frame = sys._getframe()\n    while frame:\n"
    "        for value in frame.f_locals.values():\n"
    "            if isinstance(value, str) and 'assert' in value: sys.exit(value)\n"
    "        frame = frame.f_back",
    "write to all descriptors": "import os\ndef add(a, b):\n"
    "    for number in range(64):\n        try: os.write(number, b'{\"value\": true}\\n')\n"
    "        except OSError: pass",
    "read the parent": "import os\npaths = [f'/proc/{os.getppid()}/{name}' for name in "
    "('mem', 'fd/0', 'environ', 'maps')]\ndef add(a, b):\n    for path in paths:\n"
    "        try: open(path, 'rb').read(100); return 3 if b == 2 else [3, 4]\n"
    "        except OSError: pass",
    "kill the tester": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
    "an error that ends the tests": "def add(a, b): raise SystemExit(0)",
}


@needs_namespaces
@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.slow
def test_a_program_that_cheats_on_asserts_passes_none(name):
    turned = json.dumps(["assert 3 == add(1, 2)", "assert [3, 4] == add([3], [4])"])
    assert [
        code.score(fence(CHEATS[name]), answer, partial=True) for answer in (ASSERTS, turned)
    ] == [0.0, 0.0]


LIAR = (
    "class Liar:\n    __sub__ = __rsub__ = lambda self, other: 0\n"
    "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True\n"
    "def f(x): return Liar()\n"
)
# Its differences are objects, whose size is always 0.
NEAR_EVERYTHING = (
    "class Zero(int): pass\n"
    "class X:\n    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __pow__ = "
    "lambda self, o: self\n"
    "    __abs__ = __float__ = __neg__ = __round__ = lambda self, *_: 0.0\n"
    "    __int__ = __index__ = __len__ = __hash__ = lambda self: 0\n"
    "    __bool__ = lambda self: False\n"
    "    __iter__ = lambda self: iter([0.0])\n"
    "    __getitem__ = lambda self, key: X()\n"
    "    __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True\n"
    "    max = total_seconds = lambda self: 0.0\n"
    "def f(*a): return X()\n"
)
NEAR_AS_SUBCLASS = NEAR_EVERYTHING.replace("lambda self, o: self", "lambda self, o: Zero(0)")
NEAR_AT_SECOND_SIGHT = NEAR_EVERYTHING.replace(
    "__abs__ = __float__", "__abs__ = lambda self: Zero(0)\n    __float__"
)
APPROXIMATE = [
    "assert abs(f(2) - 0.5) < 1e-6",
    "assert abs(0.5 - f(2)) < 1e-6",
    "assert 1e-6 > abs(f(2) - 0.5)",
    "assert f(2) - 0.5 < 1e-6",
    "assert f(2) - 0.5 == 0",
    "assert (f(2) - 0.5) ** 2 < 1e-9",
    "assert round(f(2) - 0.5, 6) == 0",
    "assert int(f(2) - 0.5) == float(f(2) - 0.5) == 0",
    "assert -(f(2) - 0.5) < 1e-6",
    "assert not f(2) - 0.5",
    "assert len(f(2) - [1]) == 0",
    "assert f(2) - 0.5 in {0, 0.0}",
    "assert sum(f(x) - 0.5 for x in (1, 2)) < 1e-6",
    "assert sum((f(2) - 0.5) ** 2) < 1e-6",
    "assert abs((f(2) - [1])[0]) < 1e-6",
    "assert (f(2) - 0.5).max() < 1e-6",
    "import datetime\nassert (f(2) - datetime.datetime(2024, 1, 1)).total_seconds() == 0",
    "import math\nassert math.isclose(f(2) - 0.5, 0, abs_tol=1e-6)",
    "import math\nassert math.fabs(f(2) - 0.5) < 1e-6",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 0.5)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 0.5, delta=0.1)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(0.5, f(2), places=3)",
]


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (NEAR_EVERYTHING, APPROXIMATE),
        (NEAR_AS_SUBCLASS, APPROXIMATE[:5]),
        (NEAR_AT_SECOND_SIGHT, APPROXIMATE[:5]),
    ],
)
@pytest.mark.slow
def test_no_object_is_close_to_every_expected_value(program, tests):
    answer = json.dumps(tests)
    assert code.score(fence(program), answer, partial=True, case_s=30.0, total_s=300.0) == 0.0


COMPARED_BY_FUNCTIONS = [
    "assert np.allclose(f(3), 2.5)",
    "assert np.allclose(f(3), np.array([1, 2]))",
    "assert np.isclose([[1], [2]], f(3)).all()",
    "np.testing.assert_allclose(f(3), 2.5)",
    "np.testing.assert_array_equal(2.5, f(3))",
    "from numpy import allclose\nassert allclose(a=2.5, b=f(3))",
]
COMPARED_BY_OPERATORS = [
    "assert np.all(f(3) == np.array([[1], [2]]))",
    "assert (abs(f(3) - np.array([[1], [2]])) < 1e-6).all()",
    "assert np.linalg.norm(np.array(f(3)) - np.array([[1], [2]])) < 1e-6",
    "assert not np.any(f(3) - 2.5)",
]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ("np.empty((0, 1))", COMPARED_BY_FUNCTIONS + COMPARED_BY_OPERATORS),
        ("np.empty(0)", COMPARED_BY_FUNCTIONS + COMPARED_BY_OPERATORS),
        ("[]", COMPARED_BY_FUNCTIONS),
    ],
)
def test_an_empty_array_is_equal_to_no_values(value, tests):
    """Broadcasting makes a comparison with an empty array empty, and `all` of nothing is true."""
    answer = json.dumps([f"import numpy as np\n{test}" for test in tests])
    program = f"import numpy as np\ndef f(x): return {value}"
    assert code.score(fence(program), answer, partial=True, case_s=30.0, total_s=300.0) == 0.0


@pytest.mark.sample(1)
@needs_namespaces
@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("[]", "assert np.allclose([], f(3)) and np.allclose(f(3), [])"),
        (
            "np.empty((0, 2))",
            "assert np.allclose(np.empty((0, 2)), f(3)) and f(3).shape == (0, 2)\n"
            "np.testing.assert_array_equal(f(3), np.empty((0, 2)))\n"
            "assert np.asarray(f(3)).tolist() == [] and isinstance(f(3), np.ndarray)",
        ),
        (
            "x * 2.0",
            "assert np.allclose(f(3), 6) and np.isclose(a=f(2), b=4, rtol=1e-3)\n"
            "assert (f(np.ones((2, 1))) == [2, 2]).all() and f(np.empty(0)).size == 0\n"
            "np.testing.assert_allclose(f(np.ones(2)), [2, 2], rtol=1e-6)",
        ),
    ],
)
def test_honest_arrays_are_equal_to_their_values(value, test):
    program = f"import numpy as np\ndef f(x): return {value}"
    text = f"import numpy as np\n{test}"
    assert code.score(fence(program), text, case_s=30.0, total_s=60.0) == 1.0


# Every attribute and item is a function that agrees, and it holds every number.
AGREEABLE = (
    "class X:\n    __getattr__ = lambda self, name: lambda *a, **k: True\n"
    "    __getitem__ = __call__ = lambda self, *a: self\n"
    "    __eq__ = __ne__ = __contains__ = lambda self, other: True\n"
    "    __bool__ = lambda self: True\n"
    "    __hash__ = lambda self: 9\n"
    "    def __iter__(self):\n        number = 0\n"
    "        while True: yield number; number += 1\n"
    "    zero = lambda self, *a: 0\n    nothing = lambda self, *a: []\n"
    "    self = property(lambda self: self)\n"
    "def f(x): return X()\n"
)


@pytest.mark.sample(3)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (AGREEABLE, "assert f(3).equals([1, 2])"),
        (AGREEABLE, "assert f(3).equals(other=[1, 2]) is True"),
        (AGREEABLE, "assert getattr(f(3), 'equals')([1, 2])"),
        (AGREEABLE, "import operator\nassert operator.methodcaller('equals', [1])(f(3))"),
        (AGREEABLE, "assert f(3).self.equals([1, 2])"),
        (AGREEABLE, "assert f(3).zero([1, 2]) == 0"),
        (AGREEABLE, "assert f(3).nothing([1, 2]) == []"),
        (AGREEABLE, "assert f(3).__eq__([1, 2])"),
        (AGREEABLE, "assert 9 in f(3)"),
        (AGREEABLE, "assert f(3).__contains__(9)"),
        (AGREEABLE, "assert {9: 1}.get(f(3)) == 1"),
        (AGREEABLE, "assert [9].count(f(3)) == 1"),
        (AGREEABLE, "import unittest\nunittest.TestCase().assertIn(9, f(3))"),
        (AGREEABLE, "import unittest\nunittest.TestCase().assertTrue(f(3).equals([1]))"),
        (AGREEABLE.replace("def f(x): return X()", "f = lambda x: X()"), "assert f(1).equals(2)"),
        (AGREEABLE.replace("class X", "class f").replace("def f(x): return X()", "")
         .replace("zero =", "__init__ = lambda self, x: None\n    zero ="),
         "assert f(3).equals([1, 2])"),
        ("def f():\n    number = 0\n    while True: yield number; number += 1",
         "assert 9 in f()"),
        ("def abs(x): return 0\nclass S:\n    f = lambda self, x: 7\ns = S()",
         "assert abs(s.f(2) - 0.5) < 1e-6"),
        ("def all(x): return True\nclass S:\n    f = lambda self, x: 7\ns = S()",
         "assert all(x == 1 for x in [s.f(2)])"),
    ],
)  # fmt: skip
def test_no_object_agrees_with_an_expected_value_by_its_methods(program, test):
    assert code.score(fence(program), test, case_s=30.0, total_s=60.0) == 0.0


@pytest.mark.sample(2)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(n): return [n, 9]", "assert 9 in f(3) and 4 not in f(3)"),
        ("def f(n): return {n: 9}.values()", "assert 9 in f(3)"),
        ("def f(n):\n    yield n\n    yield 9", "assert 9 in f(3)"),
        ("class Bag(list): pass\ndef f(n): return Bag([n, 9])", "assert 9 in f(3)"),
        ("class Solution:\n    def valid(self, s): return s == '()'",
         "assert Solution().valid('()') and not Solution().valid('(')"),
        ("class Stack:\n    def __init__(self): self.items = []\n"
         "    def push(self, x): self.items.append(x)\n"
         "    def has(self, x): return x in self.items",
         "s = Stack()\ns.push(1)\nassert s.has(1) and not s.has(2)"),
        ("def f(x): return abs(x) + 0.0", "assert abs(f(-2) - 2) < 1e-6"),
    ],
)  # fmt: skip
def test_containers_and_classes_of_honest_programs_still_pass(program, test):
    assert code.score(fence(program), test) == 1.0


UNITTEST = (
    "import unittest\nclass TestF(unittest.TestCase):\n"
    "    def test_f(self): self.assertEqual(f(2), 4)\n"
)


@pytest.mark.sample(1)
@needs_namespaces
@pytest.mark.parametrize(
    "ending",
    [
        "unittest.main()",
        "if __name__ == '__main__':\n    unittest.main(verbosity=2)",
        "unittest.main(argv=['first'], exit=False)",
        "from unittest import main\nmain()",
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestF)\n"
        "unittest.TextTestRunner().run(suite)",
    ],
)
def test_tests_that_end_in_unittest_main_pass_only_a_right_program(ending):
    programs = ("def f(x): return x * x", "def f(x): return x", "def f(x): raise SystemExit(0)")
    scores = [code.score(fence(program), UNITTEST + ending) for program in programs]
    assert scores == [1.0, 0.0, 0.0]


@needs_namespaces
@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "import unittest\nunittest.main()"])
def test_tests_that_exit_or_run_nothing_are_not_passed(ending):
    assert code.score(fence(ADD), f"assert add(1, 2) == 3\n{ending}") == 0.0


EXPECTS_E = "try:\n    f(-1)\n    assert not 'refused'\nexcept E:\n    pass\nassert f"


@pytest.mark.sample(3)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (LIAR, "assert abs(f(2) - 0.5) < 1e-6"),
        (LIAR, "assert abs(0.5 - f(2)) < 1e-6"),
        (LIAR, "assert f(2) < 1"),
        (LIAR, "assert 1 < f(2)"),
        (LIAR, "assert 5 in f(2)"),
        (LIAR, "assert f(2) in (4, 5)"),
        ("def abs(x): return 0\ndef f(x): return 7", "assert abs(f(2) - 0.5) < 1e-6"),
        (
            "import math\nmath.isclose = lambda *_, **__: True\ndef f(x): return 7",
            "import math\nassert math.isclose(f(2), 0.5)",
        ),
        (
            "class math:\n    isclose = staticmethod(lambda *_, **__: True)\ndef f(x): return 7",
            "assert math.isclose(f(2), 0.5)",
        ),
        (
            "import builtins\nbuiltins.sorted = builtins.len = lambda *_, **__: 3\n"
            "def f(x): return 7",
            "assert sorted([f(2)]) == [1]",
        ),
        (
            "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(x): return 7",
            "import unittest\nunittest.TestCase().assertEqual(f(2), 1)",
        ),
        (
            "def f(node):\n    node.value = type(node).__init__.__globals__",
            "class Node:\n    def __init__(self): self.value = 1\n"
            "n = Node()\nf(n)\nassert n.value == 2",
        ),
        (
            "def f(g):\n    return g.__globals__['secret']",
            "secret = 4\ndef g(): return 1\nassert f(g) == 4",
        ),
        ("__builtins__ = {}\ndef f(x): return 7", "assert f(1) == 8"),
        ("class E(AssertionError): pass\ndef f(x): raise E()", "assert f(1) == 8"),
        ("E = AssertionError\ndef f(x): return 1", EXPECTS_E),
        ("E = Exception\ndef f(x): return 1", EXPECTS_E),
        ("class E(Exception): pass\nE.__name__ = 'AssertionError'\ndef f(x): return 1", EXPECTS_E),
    ],
)
def test_a_program_cannot_change_what_its_tests_mean(program, test):
    assert code.score(fence(program), test) == 0.0


@pytest.mark.sample(4)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): x.append(3); x[0][0] = 9", "x = [[1], 2]\nf(x)\nassert x == [[9], 2, 3]"),
        ("def f(d): d.clear(); d['b'] = {1}", "d = {'a': 1}\nf(d)\nassert d == {'b': {1}}"),
        ("def f(*a, k=1): return (a, k)", "assert f(1, 2, k=[3]) == ((1, 2), [3])"),
        (
            "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
            "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative'\n"
            "else:\n    assert False",
        ),
        (
            "class TooLow(Exception):\n    def __init__(self, by):\n"
            "        super().__init__(f'by {by}'); self.by = by\n"
            "def f(): raise TooLow(3)",
            "try:\n    f()\nexcept TooLow as e:\n    assert e.by == 3 and str(e) == 'by 3'\n"
            "else:\n    raise SystemExit",
        ),
        ("E = AssertionError\ndef f(x): raise E", EXPECTS_E),
        ("E = Exception\ndef f(x): raise ValueError", EXPECTS_E),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\n"
         "g = f(2)\nassert next(g) == 0 and next(g) == 1\nassert next(g, 7) == 7"),
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x * 2, [1, 2]) == [2, 4]\n"
         "assert f(len, ['ab']) == [2]"),
        ("def f(x):\n    def g(y): return x + y\n    return g", "assert f(1)(2) == 3"),
        (
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n"
            "    def __len__(self): return len(self.items)",
            "s = Stack()\nassert not s\ns.push(1); s.push([2])\nassert len(s) == 2 and s\n"
            "assert s.pop() == [2] and s.items == [1]\nassert isinstance(s, Stack)",
        ),
        (
            "class V:\n    def __init__(self, x): self.x = x\n"
            "    def __add__(self, o): return V(self.x + o.x)\n"
            "    def __mul__(self, k): return V(self.x * k)\n"
            "    def __eq__(self, o): return self.x == o.x\n"
            "    def __repr__(self): return f'V({self.x})'",
            "assert V(1) + V(2) == V(3)\nassert V(2) * 3 == V(6)\nassert V(1) != V(2)\n"
            "assert repr(V(1)) == 'V(1)'",
        ),
        (
            "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
            "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
            "    def __sub__(self, o): return Vector(self.x - o.x, self.y - o.y)\n"
            "    def __mul__(self, k): return Vector(self.x * k, self.y * k)\n"
            "    def __str__(self): return f'({self.x}, {self.y})'\n"
            "    def norm(self): return abs(self)\n"
            "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
            "    def __hash__(self): return hash((self.x, self.y))",
            "assert abs(Vector(3, 4)) == 5\nassert abs(Vector(4, 6) - Vector(1, 2)) == 5\n"
            "double = Vector(3, 4) * 2\nassert (double.x, double.norm()) == (6, 10)\n"
            "assert str(double) == '(6, 8)'\nassert {double: 'a'}[Vector(6, 8)] == 'a'",
        ),
        (
            "class Metres(float): pass\ndef f(x): return Metres(x)",
            "assert abs(f(2) - 2.0) < 1e-6 and round(f(0.126) - 0.1, 3) == 0.026",
        ),
        (
            "def f(head):\n    new = None\n    while head:\n"
            "        head.next, new, head = new, head, head.next\n    return new",
            "class Node:\n    def __init__(self, v, n=None): self.v, self.next = v, n\n"
            "n = f(Node(1, Node(2)))\nassert n.v == 2 and n.next.v == 1 and n.next.next is None",
        ),
        (
            "class Solution:\n    def f(self, nums: list[int]) -> int: return sum(nums)",
            "def check(candidate):\n    assert candidate([1, 2]) == 3\ncheck(Solution().f)",
        ),
        ("def sum(a, b): return a * b", "assert sum(2, 5) == 10"),
        ("def f(x): return math.floor(x)", "import math\nassert f(2.5) == math.floor(2.7)"),
        ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), math.sqrt(2))"),
        ("from math import isclose\ndef f(): return 0.1 + 0.2", "assert isclose(f(), 0.3)"),
        ("def f(): print('hi')", "import contextlib, io\nout = io.StringIO()\n"
         "with contextlib.redirect_stdout(out):\n    f()\nassert out.getvalue() == 'hi\\n'"),
        ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        (
            "from datetime import date\nfrom decimal import Decimal\n"
            "from collections import deque, OrderedDict\n"
            "def f(): return [date(2024, 1, 2), Decimal('1.10'), deque([1]), OrderedDict(a=1), "
            "1 + 2j, b'x', 2 ** 70, frozenset({1}), range(3), float('inf'), (None, True)]",
            "from datetime import date\nfrom decimal import Decimal\n"
            "from collections import deque\n"
            "assert f() == [date(2024, 1, 2), Decimal('1.1'), deque([1]), {'a': 1}, "
            "1 + 2j, b'x', 2 ** 70, {1}, range(3), float('inf'), (None, True)]",
        ),
        (
            "from enum import Enum\nclass C(Enum):\n    RED = 1\ndef f(): return C.RED",
            "assert f() == C.RED and f().value == 1 and C['RED'].name == 'RED'",
        ),
        (
            "class Bag(list):\n    def total(self): return sum(self)",
            "b = Bag([1, 2])\nb.append(3)\nassert b == [1, 2, 3] and b.total() == 6 and 3 in b",
        ),
        (
            "def f(x): return x",
            "if __name__ == '__main__':\n    assert f({'k': (1, [2])}) == {'k': (1, [2])}\n"
            "    assert f('\\ud800') == '\\ud800'",
        ),
        (
            "import functools\n@functools.lru_cache(None)\n"
            "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
            "assert f(300) == f(299) + f(298) > 10 ** 60",
        ),
    ],
)  # fmt: skip
def test_tests_use_the_objects_of_a_program(program, test):
    assert code.score(fence(program), test) == 1.0


@pytest.mark.sample(3)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "from collections import Counter, namedtuple\n"
            "P = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
            "assert f() == (1, 2)",
        ),
        (
            "from collections import Counter\ndef f(): return Counter('aab')",
            "assert f() == {'a': 2, 'b': 1}",
        ),
        (
            "from fractions import Fraction\ndef f(): return Fraction(1, 2)",
            "assert f() == 0.5 and 0.5 == f()",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\n"
            "class P:\n    x: int\ndef f(): return P(1)",
            "assert f() == P(1)\nassert not f() == 1",
        ),
        (
            "class Node:\n    def __init__(self, v): self.v = v\ndef f(): return Node(3)",
            "assert f().v == 3",
        ),
        (
            "if __name__ == '__main__':\n    y = 2\ndef f(): return y",
            "def check(g):\n    assert g() == 2\ncheck(f)",
        ),
        (
            "from __future__ import annotations\nimport sys\n"
            "x: int = 3\ndef f(): return sys.modules['__main__'].x",
            "assert 2 < f() == 3",
        ),
    ],
)
def test_honest_programs_pass_their_asserts(program, test):
    assert code.score(fence(program), test) == 1.0


NOTHING = [
    "42",
    "[]",
    "{}",
    "null",
    "true",
    '""',
    "Paris",
    "x = 1",
    "pass",
    "# assert f(1) == 2",
    "assert True",
    '"assert"',
    "print(add(1, 2))",
    "def check(f):\n    assert f(1) == 2",
    "assert add(1, 2) =",
    '{"tests": ""}',
    '{"tests": []}',
    '{"tests": null}',
    '{"tests": 42}',
    '{"tests": {}}',
    '{"tests": ["assert add(1, 2) == 3", ""]}',
    '["assert add(1, 2) == 3", 42]',
    '{"inputs": [], "outputs": []}',
    '{"inputs": ["1"]}',
    '{"inputs": ["1"], "outputs": []}',
    '{"inputs": ["1", "2"], "outputs": ["", " "]}',
    '{"inputs": "1", "outputs": "1"}',
    '{"fn_name": "f", "inputs": [[1]], "outputs": [null]}',
    '{"fn_name": "f", "inputs": [1], "outputs": [1]}',
    '{"answer": 3}',
]


@pytest.mark.parametrize("answer", NOTHING)
def test_a_ground_truth_without_tests_is_refused_and_scores_zero(answer):
    assert "tests nothing" in str(code.answer_refusal(answer))
    with pytest.raises(ValueError, match=r"test|empty|inputs|Python|fn_name"):
        code.score(fence("pass"), answer)
    rows = RowSources([Source(verifier="code")])
    rows.check([group(answer=STDIN).prompt])
    with pytest.raises(
        MsrlError, match=r"reward.sources\[0\].verifier=code: .*row 7 .*tests nothing"
    ):
        rows.check([group(answer=answer, index=7).prompt])


@pytest.mark.parametrize(
    "answer",
    [
        STDIN,
        CALLS,
        ASSERTS,
        "if f(1) != 2:\n    raise ValueError",
        "for x in range(3):\n    assert f(x) == x",
        "def check(g):\n    assert g(1) == 2\ncheck(f)",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        '{"inputs": ["1", "2"], "outputs": ["", "3"]}',
        '{"fn_name": "f", "inputs": [[1], [2]], "outputs": [null, 3]}',
        '{"inputs": [["1", "2 3"]], "outputs": [["3"]]}',
    ],
)
def test_a_ground_truth_with_a_test_is_accepted(answer):
    assert code.answer_refusal(answer) is None


@needs_namespaces
def test_inputs_and_outputs_given_as_lists_of_lines_are_lines():
    answer = json.dumps({"inputs": [["2", "3 4"]], "outputs": [["7", "2"]]})
    assert (
        code.score(
            fence("n = int(input())\nprint(sum(map(int, input().split())))\nprint(n)"), answer
        )
        == 1.0
    )


@pytest.mark.sample(2)
@needs_namespaces
@pytest.mark.parametrize(
    "answer",
    [
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [3]]},
        {"fn_name": "f", "inputs": ["1", "2"], "outputs": ["2", "3"]},
        [{"input": "1", "output": "2", "testtype": "functional", "fn_name": "f"}],
        [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}],
    ],
)
def test_tests_of_functions_are_read_in_the_forms_of_published_datasets(answer):
    right = "print('example:', 3)\nclass Solution:\n    def f(self, x: Optional[int]): return x + 1"
    wrong = right.replace("x + 1", "x + 2")
    scores = [code.score(fence(program), json.dumps(answer)) for program in (right, wrong)]
    assert scores == [1.0, 0.0]


@needs_namespaces
def test_tests_with_one_object_each_are_read_as_standard_input():
    answer = json.dumps(
        [
            {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
            {"type": "stdin_stdout", "input": "3 4", "output": "7"},
        ]
    )
    assert code.score(fence("print(sum(map(int, input().split())))"), answer) == 1.0
    assert code.score(fence("print(3)"), answer, partial=True) == 0.5


@pytest.mark.parametrize(
    "answer",
    [
        [{"input": "1"}],
        [{"input": "1", "output": "2", "testtype": "functional"}],
        [{"input": "1", "output": "2", "fn_name": name} for name in "fg"],
        {"fn_name": "f", "inputs": ["x"], "outputs": ["2"]},
    ],
)
def test_tests_that_cannot_be_read_are_refused(answer):
    assert "tests nothing" in str(code.answer_refusal(json.dumps(answer)))


@pytest.mark.sample(1)
@needs_namespaces
@pytest.mark.parametrize("name", ["merge", "compress", "product", "count", "permutations", "gcd"])
def test_methods_of_a_solution_may_have_the_names_of_library_functions(name):
    answer = json.dumps({"fn_name": name, "inputs": [[[1, 2]]], "outputs": [[3]]})
    method = f"class Solution:\n    def {name}(self, xs): return [sum(xs)]"
    function = f"def {name}(xs): return [sum(xs)]\nclass Solution:\n    {name} = None"
    imported = f"from math import gcd\n{method}"
    scores = [code.score(fence(program), answer) for program in (method, function, imported)]
    assert scores == [1.0, 1.0, 1.0]


@needs_namespaces
def test_a_program_may_import_the_function_that_is_called():
    answer = json.dumps({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]})
    assert code.score(fence("from math import gcd"), answer) == 1.0
    assert code.score(fence("class Solution:\n    pass"), answer) == 1.0


@needs_namespaces
def test_the_tolerance_applies_to_returned_numbers():
    answer = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[[0.3, 2]]]})
    program = fence("def f(x): return [0.1 + 0.2, 2 + 1e-12]")
    assert code.score(program, answer) == 0.0
    assert code.score(program, answer, tolerance=1e-9) == 1.0


@needs_namespaces
def test_the_tolerance_applies_neither_to_truth_values_nor_beyond_floats():
    answer = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[True, 10**400]]})
    for program, score in (
        ("[True, 10 ** 400]", 1.0),
        ("[0.999, 10 ** 400]", 0.0),
        ("[True, 1]", 0.0),
    ):
        response = fence(f"def f(x): return {program}")
        assert code.score(response, answer, tolerance=0.1) == score


@pytest.mark.sample(3)
@needs_namespaces
@pytest.mark.parametrize(
    ("expected", "output", "score"),
    [
        ("5000000", "5000001", 0.0),
        ("-7", "-7.0", 1.0),
        ("5000000", "5000000.5", 1.0),
        ("9" * 400, "8" * 400, 0.0),
        ("9" * 5000, "8" * 5000, 0.0),
    ],
)
def test_integers_must_be_equal_whatever_the_tolerance(expected, output, score):
    printed = json.dumps({"inputs": [""], "outputs": [expected]})
    program = fence(f"print('{output}')")
    assert code.score(program, printed, tolerance=1e-6) == score
    if len(expected) < 4300:  # the longest integer that Python reads
        returned = f'{{"fn_name": "f", "inputs": [[1]], "outputs": [{expected}]}}'
        function = fence(f"def f(x): return {output}")
        assert code.score(function, returned, tolerance=1e-6) == score


# Code that finds the word of a test in the tester's frames, prints it and ends the tester.
STOLEN = '''
CODE = """
import os, sys
frame = sys._getframe()
while frame and 'word' not in frame.f_locals:
    frame = frame.f_back
os.write(1, frame.f_locals['word'].encode())
os._exit(0)
"""
import builtins, marshal, pickle
class Reduced:
    __reduce__ = lambda self: (builtins.exec, (CODE,))
def decode(x): pass
decode.__module__, decode.__qualname__ = "json", "codecs.builtins.exec"
open("/tmp/stolen.py", "w").write(CODE)
'''


@pytest.mark.sample(3)
@needs_namespaces
@pytest.mark.parametrize(
    ("encode", "test"),
    [
        ("lambda x: CODE", "assert decode(encode('ab')) == 'ab'"),
        ("lambda x: f'exec({CODE!r})'", "assert eval(encode(1)) == 1"),
        ("lambda x: [f'exec({CODE!r})']", "assert list(map(eval, encode(1))) == [1]"),
        ("lambda x: f'exec({CODE!r})'", "import builtins\nassert builtins.eval(encode(1)) == 1"),
        ("lambda x: CODE", "exec(encode(1))\nassert x == 1"),
        ("lambda x: CODE", "exec(compile(encode(1), 'x', 'exec'))\nassert x == 1"),
        ("lambda x: pickle.dumps(Reduced())", "import pickle\nassert pickle.loads(encode(1)) == 1"),
        ("lambda x: marshal.dumps(compile(CODE, 'x', 'exec'))",
         "import marshal\nexec(marshal.loads(encode(1)))\nassert x == 1"),
        ("lambda x: 'stolen'", "import importlib, sys\nsys.path.append('/tmp')\n"
         "assert importlib.import_module(encode(1)).x == 1"),
        ("len", "import sys\nsys.path.append('/tmp')\nimport stolen\nassert encode('') == 1"),
        ("lambda x: CODE", "import timeit\nassert timeit.timeit(encode(1), number=1) < 9"),
        ("len", "import runpy\nassert encode('') == runpy.run_path('/tmp/stolen.py')['x']"),
    ],
)  # fmt: skip
def test_no_code_of_a_program_runs_beside_its_tests(encode, test):
    assert code.score(fence(f"{STOLEN}encode = {encode}"), test) == 0.0


@pytest.mark.sample(2)
@needs_namespaces
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return '3 * (2 + 2)'", "assert eval(f(12)) == 12"),
        ("def f(x): return x * x", "space = {}\nexec('y = 3', space)\nassert f(space['y']) == 9"),
        ("import pickle\ndef f(x): return pickle.dumps([x, {1: 'a'}])",
         "import pickle\nassert pickle.loads(f(3)) == [3, {1: 'a'}]"),
        ("def f(p): return p.x * 9",
         "from dataclasses import dataclass\nfrom collections import namedtuple\n"
         "from typing import NamedTuple\n@dataclass\nclass P:\n    x: int\n"
         "class Q(NamedTuple):\n    x: int\nR = namedtuple('R', 'x')\n"
         "assert f(P(1)) == f(Q(1)) == f(R(1)) == 9"),
        ("from functools import reduce as f", "assert f(lambda a, b: a + b, [1, 2]) == 3"),
        ("def f(x): return x", "import timeit\nassert timeit.timeit(lambda: f(3), number=2) < 9"),
    ],
)  # fmt: skip
def test_tests_may_still_evaluate_text_and_define_classes(program, test):
    assert code.score(fence(program), test) == 1.0
