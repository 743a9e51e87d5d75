"""The inside of `sandbox.py`: a program of its own, started as `python -I -S sandbox_init.py`, with nothing but the standard library.

The job comes as JSON on standard input, the results leave as JSON on standard output. Between the two: new namespaces (pid, network,
mount, ipc, uts, user), a root of read-only pieces, a private /tmp in memory, an unprivileged user without capabilities, a seccomp filter,
limits of resources, and a first process that watches time, memory and output and ends everything that was started. Once the root is
changed, this process imports nothing more (a codec is a module too): its own library is there only if the program's interpreter shares it.
Manual pages: namespaces(7), user_namespaces(7), pivot_root(2), seccomp(2), prctl(2).
"""

# ruff: noqa: PTH103, PTH112, PTH114, PTH115, PTH120, PTH123, PTH208, PTH211
# os.path alone: this starts for every program, and pathlib is slow to import.

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import time

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
KEPT = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}  # a remount must name them
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS, SECCOMP, DETACH = 1, 4, 38, 22, 2
NOBODY = 65534
NEW_ROOT = "/sys"  # any folder that is there and of which nothing is wanted inside
PRIVATE_TMP = NEW_ROOT + "/tmp"
DEVICES = ("null", "zero", "full", "random", "urandom")
POLL_S = 0.02
MAX_STDERR = 4000
# Refused system calls, by machine: memory that belongs to no process, and doors into the kernel that no program of an exercise needs:
# memfd_create shmget msgget semget unshare setns mount ptrace process_vm_readv/writev add_key request_key keyctl bpf perf_event_open
# userfaultfd io_uring_setup/enter/register memfd_secret open_by_handle_at
REFUSED = {
    "x86_64": (0xC000003E, (319, 29, 68, 64, 272, 308, 165, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425, 426, 427, 447, 304)),
    "aarch64": (0xC00000B7, (279, 194, 186, 190, 97, 268, 40, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425, 426, 427, 447, 265)),
}
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the job, build the sandbox, run the cases, write what came of them; or write why there can be no sandbox here."""
    job = json.load(sys.stdin)
    try:
        _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        is_root = os.geteuid() == 0
        user, group = os.geteuid(), os.getegid()
        _call("unshare", NEWPID | NEWNET | NEWNS | NEWIPC | NEWUTS | (0 if is_root else NEWUSER))
        if not is_root:
            _map_to(user, group)
    except OSError as error:
        _answer({"refused": str(error)})
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of what a first process does not handle the kernel lets nothing through to it
    try:
        _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _build_root(job)
        _become_unprivileged(is_root)
    except OSError as error:
        _answer({"refused": str(error)})
        return
    _answer({"cases": _cases(job)})


def _answer(message: object) -> None:
    sys.stdout.write(json.dumps(message))
    sys.stdout.flush()


def _call(name: str, *arguments: object) -> None:
    """A function of the C library that returns 0. Raises OSError that names it."""
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        told = " ".join(a.decode() if isinstance(a, bytes) else str(a) for a in arguments[:3])
        raise OSError(code, f"{name}({told}): {os.strerror(code)}")


def _map_to(user: int, group: int) -> None:
    """The one user and group that the new user namespace knows, under the same numbers; never root's."""
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w", encoding="utf-8") as stream:
            stream.write(text)


# --- what is seen inside ------------------------------------------------------------------------------------------------------------


def _build_root(job: dict) -> None:
    """A root in memory with read-only pieces of the machine, /dev, /proc and /tmp; the machine's own root is gone afterwards."""
    _mount(None, "/", None, REC | PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", NOSUID | NODEV, f"size={len(job['program'].encode()) + (1 << 20)},mode=755")
    os.makedirs(PRIVATE_TMP)
    _mount("tmpfs", PRIVATE_TMP, "tmpfs", NOSUID | NODEV, f"size={job['files_bytes']},nr_inodes=4096,mode=1777")
    for path in job["binds"]:
        _hold_parents(path)
        _bind(path)
    os.makedirs(f"{NEW_ROOT}/dev", exist_ok=True)
    for device in DEVICES:
        _bind(f"/dev/{device}")
    for target, link in (("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")):
        os.symlink(target, f"{NEW_ROOT}/dev/{link}")
    for folder in ("proc", "sandbox"):
        os.makedirs(f"{NEW_ROOT}/{folder}", exist_ok=True)
    with open(f"{NEW_ROOT}/sandbox/program.py", "w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.write(job["program"])
    _make_read_only()
    _mount("proc", f"{NEW_ROOT}/proc", "proc", NOSUID | NODEV | NOEXEC)
    os.chdir(NEW_ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir("/tmp")


def _hold_parents(path: str) -> None:
    """An interpreter below /tmp stands in a read-only folder of its own there: nothing above it can be moved or replaced."""
    if not path.startswith("/tmp/"):
        return
    first, _, rest = path.removeprefix("/tmp/").partition("/")
    holder = f"{PRIVATE_TMP}/{first}"
    if rest and not os.path.ismount(holder):
        os.makedirs(holder, exist_ok=True)
        _mount("tmpfs", holder, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")


def _bind(path: str) -> None:
    """Show a file or folder of the machine inside, what a link to a folder leads to in the link's place; a link to a file is copied.

    So no link to a folder stands in the new root, where this process, which still sees the machine, would follow it out.
    """
    inside = NEW_ROOT + path
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path) and not os.path.isdir(path):
        os.symlink(os.readlink(path), inside)
        return
    if os.path.isdir(path):
        os.makedirs(inside, exist_ok=True)
    else:
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, inside, None, BIND | REC)


def _make_read_only() -> None:
    """The new root and every mount in it but the private /tmp, each with the flags that it has already."""
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        rows = [line.split(" ") for line in stream]
    inside = {next(row[0] for row in reversed(rows) if row[4] == NEW_ROOT)}
    for number, parent, _, _, place, options, *_ in rows:  # a parent comes before its children
        if parent in inside or number in inside:
            inside.add(number)
            kept = sum(KEPT.get(option, 0) for option in options.split(",") if option not in ("ro", "nosuid"))
            path = place.encode().decode("unicode_escape").encode("latin-1").decode()
            if path != PRIVATE_TMP:
                _mount(None, path, None, REMOUNT | BIND | RDONLY | NOSUID | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _become_unprivileged(is_root: bool) -> None:
    """Nobody, and that in a user namespace of its own: limits of processes count there, and this process cannot be traced from inside."""
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _call("prctl", DUMPABLE, 1, 0, 0, 0)  # its own files in /proc, which are root's after the change of user
        _call("unshare", NEWUSER)
        _map_to(NOBODY, NOBODY)
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="utf-8") as stream:
        stream.write("0")  # none below this one
    _call("prctl", DUMPABLE, 0, 0, 0, 0)
    _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user forgets it


# --- running ------------------------------------------------------------------------------------------------------------------------


def _cases(job: dict) -> list[dict]:
    """One result per input, as far as the time of all of them goes; with `stop`, none behind the first that did not end well."""
    end, results = time.monotonic() + job["total_s"], []
    for text in job["inputs"]:
        limit = min(time.monotonic() + job["case_s"], end)
        status, stdout, stderr = _case(job, text, limit) if time.monotonic() < end else ("timeout", b"", b"")
        results.append({"status": status, "stdout": base64.b64encode(stdout).decode(), "stderr": stderr.decode("utf-8", "replace")})
        if status != "ok" and job["stop"]:
            break
    return results


def _case(job: dict, text: str, end: float) -> tuple[str, bytes, bytes]:
    """Run the program once. Returns how it ended (ok, error, timeout, memory, output) and what it said."""
    data = os.memfd_create("input")
    rest = memoryview(text.encode("utf-8", "surrogatepass"))
    while rest:
        rest = rest[os.write(data, rest) :]
    os.lseek(data, 0, os.SEEK_SET)
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _become_program(job, (data, out[1], err[1]))
    for number in (data, out[1], err[1]):
        os.close(number)
    said = {out[0]: b"", err[0]: b""}
    status = _watch(job, child, said, out[0], end)
    _end_all()
    _read_rest(said)
    for number in said:
        os.close(number)
    return status, said[out[0]][: job["output_bytes"]], said[err[0]][-MAX_STDERR:]


def _watch(job: dict, child: int, said: dict[int, bytes], out: int, end: float) -> str:
    """Wait for the end of the program, or for the first limit that it goes beyond."""
    while True:
        _read(said, POLL_S)
        if len(said[out]) > job["output_bytes"]:
            return "output"
        for number in said:
            said[number] = said[number] if number == out else said[number][-MAX_STDERR:]
        ended = _reap(child)
        if ended is not None:
            return "ok" if ended == 0 else "error"
        if time.monotonic() > end:
            return "timeout"
        if _resident_bytes() > job["memory_bytes"]:
            return "memory"


def _read_rest(said: dict[int, bytes]) -> None:
    """All that the pipes still hold; nobody writes any more."""
    while _read(said, 0.0):
        pass


def _read(said: dict[int, bytes], timeout_s: float) -> bool:
    """What the pipes hold now, at most 64 KB of each, and whether that was anything; waits up to `timeout_s` for the first."""
    poll = select.poll()
    for number in said:
        poll.register(number, select.POLLIN)
    ready = [number for number, event in poll.poll(timeout_s * 1000) if event & select.POLLIN]
    for number in ready:
        said[number] += os.read(number, 1 << 16)
    if not ready and timeout_s:
        time.sleep(POLL_S / 10)  # closed pipes are always ready
    return bool(ready)


def _reap(child: int) -> int | None:
    """The status of the program if it has ended; whatever else has ended is reaped."""
    with contextlib.suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == child:
                return status
            if number == 0:
                return None
    return -1


def _resident_bytes() -> int:
    """Memory of all processes inside but this one."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/statm", encoding="utf-8") as stream:
                pages += int(stream.read().split()[1])
    return pages * resource.getpagesize()


def _end_all() -> None:
    """Kill and reap everything inside but this process; what forks meanwhile is met by the next round."""
    for _ in range(1000):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _become_program(job: dict, files: tuple[int, int, int]) -> None:
    """In the child: its files, limits and filter, then the program itself."""
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 4096)
        for name, limit in _limits(job).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        _call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        _filter_calls()
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        os.execve(job["python"], [job["python"], "-I", "-B", "/sandbox/program.py"], environment)
    except BaseException as error:
        os.write(2, f"the sandbox cannot start the program: {error}".encode())
    finally:
        os._exit(127)


def _limits(job: dict) -> dict[str, int]:
    return {
        "AS": job["memory_bytes"],
        "CPU": math.ceil(job["case_s"]) + 1,
        "FSIZE": job["files_bytes"],
        "NPROC": job["processes"] + 1,  # the watching process counts too
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }


def _filter_calls() -> None:
    """REFUSED fails with EPERM; another architecture's calls (32 bits, x32) end the process."""
    architecture, refused = REFUSED[platform.machine()]
    kill, allow, deny = 0x80000000, 0x7FFF0000, 0x00050001
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    steps += [(equal, len(refused) - i, 0, number) for i, number in enumerate(refused)]
    steps += [(give, 0, 0, allow), (give, 0, 0, deny)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    _call("prctl", SECCOMP, 2, ctypes.c_char_p(program), 0, 0)


if __name__ == "__main__":
    main()
