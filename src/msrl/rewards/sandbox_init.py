"""Process inside the sandbox of `sandbox.py`, started as `python -I -S sandbox_init.py`.

It uses only the standard library, reads the job as JSON from standard input and writes the results
as JSON to standard output. It sets up:

- new namespaces (pid, network, mount, ipc, uts, user),
- a root of read-only mounts with a private /tmp in memory,
- an unprivileged user without capabilities, a seccomp filter and resource limits,
- a memory cgroup, if this process may create one,
- a first process that watches time, memory and output and kills all processes at the end.

After the root is changed, this process must not import anything (codecs are modules too): its own
library is visible only if the program's interpreter shares it.
Manual pages: namespaces(7), user_namespaces(7), pivot_root(2), seccomp(2), prctl(2), cgroups(7).
"""

# ruff: noqa: PTH102, PTH103, PTH106, PTH110, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208
# ruff: noqa: PTH211
# os.path only: this process starts for every program, and pathlib is slow to import.

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import math
import os
import platform
import resource
import select
import signal
import stat
import struct
import sys
import time

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
# Mount options that a remount must repeat.
MOUNT_FLAGS = {
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS, SECCOMP, THP_DISABLE, DETACH = 1, 4, 38, 22, 41, 2
NOBODY = 65534
NEW_ROOT = "/sys"  # any existing folder that the sandbox does not need
PRIVATE_TMP = NEW_ROOT + "/tmp"
DEVICES = ("null", "full", "random", "urandom")  # a shared map of "zero" belongs to no process
CGROUPS, GROUP_PREFIX = "/sys/fs/cgroup", "msrl-sandbox-"
OPEN_FILES = 64
PIPE_BYTES = 16 * resource.getpagesize()
SOCKET_BYTES = 212_992  # net.core.wmem_default, unless this machine has another value
DATAGRAMS = 11  # that a socket holds beside the datagrams of its senders
POLL_S = 0.02
MAX_STDERR = 4000
# Denied system calls by machine. They create memory that belongs to no process, or reach parts of
# the kernel that exercise programs do not need: memfd_create shmget msgget semget unshare setns
# mount ptrace process_vm_readv/writev add_key request_key keyctl bpf perf_event_open userfaultfd
# io_uring_setup/enter/register memfd_secret open_by_handle_at vmsplice io_setup inotify_init1
# fanotify_init landlock_create_ruleset (inotify_init).
# fmt: off
DENIED_CALLS = {
    "x86_64": (0xC000003E, (
        319, 29, 68, 64, 272, 308, 165, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425, 426, 427,
        447, 304, 278, 206, 294, 300, 444, 253,
    )),
    "aarch64": (0xC00000B7, (
        279, 194, 186, 190, 97, 268, 40, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425, 426, 427,
        447, 265, 75, 0, 26, 262, 444,
    )),
}
# fmt: on
# System calls denied for one value of an argument: name, index, mask and value. Shared anonymous
# maps, larger pipes, larger socket buffers, and huge pages, which stay when a part is released.
DENIED_VALUES = (
    ("mmap", 3, 0x2F, 0x21),  # MAP_SHARED | MAP_ANONYMOUS
    ("fcntl", 1, 0xFFFFFFFF, 1031),  # F_SETPIPE_SZ
    ("setsockopt", 2, 0xFFFFFFFF, 7),  # SO_SNDBUF
    ("prctl", 0, 0xFFFFFFFF, THP_DISABLE),
)
CALL_NUMBERS = {
    "x86_64": {"mmap": 9, "fcntl": 72, "setsockopt": 54, "prctl": 157},
    "aarch64": {"mmap": 222, "fcntl": 25, "setsockopt": 208, "prctl": 167},
}
# System call `prlimit64`, which may only concern the calling process: any other process of the same
# user accepts new limits, also the watching one.
LIMIT_CALL = {"x86_64": 302, "aarch64": 261}
# All seals of a memfd (fcntl(2)): a program cannot change its input, or keep memory in it.
ADD_SEALS, ALL_SEALS = 1033, 0xF
# System calls `socket` and `socketpair`. Other families (vsock, netlink, packet, ...) are not
# confined by the network namespace, or reach parts of the kernel that programs do not need.
SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}
SOCKET_FAMILIES = (1, 2, 10)  # unix, inet, inet6
NO_SUCH_FAMILY = 97  # EAFNOSUPPORT
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the job, build the sandbox, run the cases and write the results or the refusal."""
    job = json.load(sys.stdin)
    job["socket_bytes"] = _socket_bytes()
    job["group"] = _create_group(job["memory_bytes"] + job["files_bytes"])
    try:
        _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        is_root = os.geteuid() == 0
        user, group = os.geteuid(), os.getegid()
        namespaces = NEWPID | NEWNET | NEWNS | NEWIPC | NEWUTS
        _call("unshare", namespaces if is_root else namespaces | NEWUSER)
        if not is_root:
            _map_user(user, group)
    except OSError as error:
        _remove_group(job["group"])
        _answer({"refused": str(error)})
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        _remove_group(job["group"])
        return
    # The kernel delivers only handled signals to the first process of a namespace, so with the
    # default action SIGINT does not reach it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _build_root(job)
        _become_unprivileged(is_root)
    except OSError as error:
        _answer({"refused": str(error)})
        return
    _answer({"cases": _run_cases(job)})


def _answer(message: object) -> None:
    sys.stdout.write(json.dumps(message))
    sys.stdout.flush()


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError with its name if it does not return 0."""
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in arguments[:3]]
        raise OSError(code, f"{name}({' '.join(texts)}): {os.strerror(code)}")


def _map_user(user: int, group: int) -> None:
    """Map only this user and group, never root, into the new user namespace with the same ids."""
    maps = {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }
    for file, text in maps.items():
        with open(f"/proc/self/{file}", "w", encoding="utf-8") as stream:
            stream.write(text)


# --- Memory cgroup --------------------------------------------------------------------------------


def _create_group(limit: int) -> dict | None:
    """Create a cgroup (version 2) with a limit of memory, a sibling of this process's cgroup.

    Removes the groups of killed sandboxes. Returns open files of the group and its parent, since
    their paths do not exist in the new root, or None if this process may not create a group. The
    limits of the processes hold either way.
    """
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/cgroup", encoding="utf-8") as stream:
            own = next(line[3:].rstrip() for line in stream if line.startswith("0::"))
        parent = CGROUPS + os.path.dirname(own).rstrip("/")
        with open(f"{parent}/cgroup.subtree_control", encoding="utf-8") as stream:
            if "memory" not in stream.read().split():
                return None
        _remove_abandoned_groups(parent)
        name = f"{GROUP_PREFIX}{os.getpid()}"
        group = f"{parent}/{name}"
        os.mkdir(group)
        for file, value in (("memory.max", limit), ("memory.oom.group", 1), ("memory.swap.max", 0)):
            with (
                contextlib.suppress(FileNotFoundError),  # kernels without swap
                open(f"{group}/{file}", "w", encoding="utf-8") as stream,
            ):
                stream.write(str(value))
        return {
            "name": name,
            "parent": os.open(parent, os.O_RDONLY),
            "members": os.open(f"{group}/cgroup.procs", os.O_WRONLY),
            "events": os.open(f"{group}/memory.events", os.O_RDONLY),
        }
    return None


def _remove_abandoned_groups(parent: str) -> None:
    for name in os.listdir(parent):
        number = name.removeprefix(GROUP_PREFIX)
        if number != name and not os.path.exists(f"/proc/{number}"):
            with contextlib.suppress(OSError):  # another sandbox removes it
                os.rmdir(f"{parent}/{name}")


def _remove_group(group: dict | None) -> None:
    if group:
        with contextlib.suppress(OSError):
            os.rmdir(group["name"], dir_fd=group["parent"])


def _memory_kills(job: dict) -> int:
    """Return how many processes the kernel has killed at the group's limit of memory."""
    if job["group"] is None:
        return 0
    fields = os.pread(job["group"]["events"], 4096, 0).split()
    return int(fields[fields.index(b"oom_kill") + 1])


# --- File system inside the sandbox ---------------------------------------------------------------


def _build_root(job: dict) -> None:
    """Build a root of read-only mounts, /dev, /proc and /tmp, and detach the old root."""
    root_bytes = len(job["program"].encode()) + (1 << 20)
    tmp_options = f"size={job['files_bytes']},nr_inodes=4096,mode=1777"
    _mount(None, "/", None, REC | PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", NOSUID | NODEV, f"size={root_bytes},mode=755")
    os.makedirs(PRIVATE_TMP)
    _mount("tmpfs", PRIVATE_TMP, "tmpfs", NOSUID | NODEV, tmp_options)
    for path in job["binds"]:
        _protect_parents(path)
        _bind(path)
    os.makedirs(f"{NEW_ROOT}/dev", exist_ok=True)
    for device in DEVICES:
        _bind(f"/dev/{device}")
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    links["shm"] = "/tmp"  # semaphores and shared memory of multiprocessing
    for link, target in links.items():
        os.symlink(target, f"{NEW_ROOT}/dev/{link}")
    for folder in ("proc", "sandbox"):
        os.makedirs(f"{NEW_ROOT}/{folder}", exist_ok=True)
    program = f"{NEW_ROOT}/sandbox/program.py"
    with open(program, "w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.write(job["program"])
    _make_read_only()
    _mount("proc", f"{NEW_ROOT}/proc", "proc", NOSUID | NODEV | NOEXEC)
    os.chdir(NEW_ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir("/tmp")


def _protect_parents(path: str) -> None:
    """Mount a read-only folder above an interpreter in /tmp, so it cannot be replaced."""
    if not path.startswith("/tmp/"):
        return
    first, _, remainder = path.removeprefix("/tmp/").partition("/")
    parent = f"{PRIVATE_TMP}/{first}"
    if remainder and not os.path.ismount(parent):
        os.makedirs(parent, exist_ok=True)
        _mount("tmpfs", parent, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")


def _bind(path: str) -> None:
    """Mount a file or folder of the machine at the same path in the new root.

    A link to a folder becomes a mount of its target, and a link to a file is copied. The new root
    therefore has no links to folders, which this process could follow back into the machine's root.
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
    """Remount the new root and all mounts in it except /tmp read-only, with their other flags."""
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        rows = [line.split(" ") for line in stream]
    inside = {next(row[0] for row in reversed(rows) if row[4] == NEW_ROOT)}
    for number, parent, _, _, mount_point, options, *_ in rows:  # parents precede their children
        if parent not in inside and number not in inside:
            continue
        inside.add(number)
        path = mount_point.encode().decode("unicode_escape").encode("latin-1").decode()
        if path != PRIVATE_TMP:
            flags = {MOUNT_FLAGS.get(option, 0) for option in options.split(",")}
            _mount(None, path, None, REMOUNT | BIND | sum(flags | {RDONLY, NOSUID}))


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _become_unprivileged(is_root: bool) -> None:
    """Become the user nobody in a separate user namespace.

    Process limits are counted per namespace, and programs inside cannot trace this process.
    """
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # After the change of user, root owns the /proc files of this process until it is dumpable.
        _call("prctl", DUMPABLE, 1, 0, 0, 0)
        _call("unshare", NEWUSER)
        _map_user(NOBODY, NOBODY)
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="utf-8") as stream:
        stream.write("0")  # forbids nested user namespaces
    _call("prctl", DUMPABLE, 0, 0, 0, 0)
    _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the change of user cleared it


# --- Execution ------------------------------------------------------------------------------------


def _run_cases(job: dict) -> list[dict]:
    """Return one result per input; with `stop`, end after the first case that is not ok."""
    end, results = time.monotonic() + job["total_s"], []
    for text in job["inputs"]:
        start = time.monotonic()
        status, stdout, stderr = "timeout", b"", b""
        if start < end:
            status, stdout, stderr = _run_case(job, text, min(start + job["case_s"], end))
        encoded = base64.b64encode(stdout).decode()
        message = stderr.decode("utf-8", "replace")
        results.append({"status": status, "stdout": encoded, "stderr": message})
        if status != "ok" and job["stop"]:
            break
    return results


def _run_case(job: dict, text: str, end: float) -> tuple[str, bytes, bytes]:
    """Run the program once.

    Returns:
        The status (ok, error, timeout, memory, output), standard output and standard error.
    """
    data = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    unwritten = memoryview(text.encode("utf-8", "surrogatepass"))
    while unwritten:
        unwritten = unwritten[os.write(data, unwritten) :]
    os.lseek(data, 0, os.SEEK_SET)
    fcntl.fcntl(data, ADD_SEALS, ALL_SEALS)
    out, err = os.pipe(), os.pipe()
    kills = _memory_kills(job)
    child = os.fork()
    if child == 0:
        _become_program(job, (data, out[1], err[1]))
    for number in (data, out[1], err[1]):
        os.close(number)
    output = {out[0]: b"", err[0]: b""}
    status = _watch(job, child, output, out[0], end)
    _kill_all()
    if status == "error" and _memory_kills(job) > kills:
        status = "memory"
    _drain(output)
    for number in output:
        os.close(number)
    return status, output[out[0]][: job["output_bytes"]], output[err[0]][-MAX_STDERR:]


def _watch(job: dict, child: int, output: dict[int, bytes], out: int, end: float) -> str:
    """Wait until the program ends or exceeds a limit, and return its status."""
    while True:
        _read(output, POLL_S)
        if len(output[out]) > job["output_bytes"]:
            return "output"
        for number in output:
            if number != out:
                output[number] = output[number][-MAX_STDERR:]
        exit_status = _reap(child)
        if exit_status is not None:
            return "ok" if exit_status == 0 else "error"
        if time.monotonic() > end:
            return "timeout"
        if _held_bytes(job["socket_bytes"]) > job["memory_bytes"]:
            return "memory"


def _drain(output: dict[int, bytes]) -> None:
    """Read the remaining data of the pipes after all writers have ended."""
    while _read(output, 0.0):
        pass


def _read(output: dict[int, bytes], timeout_s: float) -> bool:
    """Read up to 64 KiB from each pipe; wait up to `timeout_s` and return True if data arrived."""
    poll = select.poll()
    for number in output:
        poll.register(number, select.POLLIN)
    ready = [number for number, event in poll.poll(timeout_s * 1000) if event & select.POLLIN]
    for number in ready:
        output[number] += os.read(number, 1 << 16)
    if not ready and timeout_s:
        time.sleep(POLL_S / 10)  # closed pipes are always ready
    return bool(ready)


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the status of the program, or None if it is running."""
    with contextlib.suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == child:
                return status
            if number == 0:
                return None
    return -1


def _held_bytes(socket_bytes: int) -> int:
    """Return the memory of all processes inside except this one.

    Pipes and sockets, whose buffers belong to no process, count as full.
    """
    held, pipes = 0, set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        process = 0
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{name}/task"):  # a thread can outlive the first one
                with contextlib.suppress(OSError):
                    process = max(process, _task_bytes(f"/proc/{name}/task/{task}"))
                    pipes |= _pipes(f"/proc/{name}/task/{task}/fd")
        held += process
    return held + len(pipes) * PIPE_BYTES + _sockets() * socket_bytes


def _task_bytes(folder: str) -> int:
    """Return the resident pages, page tables and swapped pages of a thread's process."""
    fields = ("VmRSS:", "VmPTE:", "VmSwap:")
    with open(f"{folder}/status", encoding="utf-8", errors="replace") as stream:
        return 1024 * sum(int(line.split()[1]) for line in stream if line.startswith(fields))


def _pipes(folder: str) -> set[object]:
    """Return the pipes among open files; of a process that cannot be read, as many as it may open.

    Threads can have separate files, and a pipe can have any path.
    """
    pipes: set[object] = set()
    try:
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(f"{folder}/{number}")
                if stat.S_ISFIFO(status.st_mode):
                    pipes.add((status.st_dev, status.st_ino))
    except PermissionError:
        return {(folder, number) for number in range(OPEN_FILES)}
    return pipes


def _sockets() -> int:
    """Return how many buffers the Unix sockets inside have, also of unaccepted connections."""
    with open("/proc/self/net/unix", encoding="utf-8", errors="replace") as stream:
        kinds = [line.split()[4] for line in stream][1:]
    return sum(DATAGRAMS if kind == "0002" else 1 for kind in kinds)


def _socket_bytes() -> int:
    """Return how much a socket may hold by default."""
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/net/core/wmem_default", encoding="utf-8") as stream,
    ):
        return int(stream.read())
    return SOCKET_BYTES


def _kill_all() -> None:
    """Kill and reap all other processes inside; repeat for processes that fork in the meantime."""
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
    """Set up files, limits and the filter in the child process, then execute the program."""
    try:
        os.setsid()
        if job["group"]:
            with contextlib.suppress(OSError):  # old kernels ask for the rights of this user
                os.write(job["group"]["members"], b"0")
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 4096)
        for name, limit in _limits(job).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        _call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", THP_DISABLE, 1, 0, 0, 0)
        _filter_calls()
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [job["python"], "-I", "-B", "/sandbox/program.py"]
        os.execve(job["python"], command, environment)
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
        "NOFILE": OPEN_FILES,
        "SIGPENDING": 1024,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }


def _filter_calls() -> None:
    """Install the seccomp filter.

    DENIED_CALLS, DENIED_VALUES and limits of other processes fail with EPERM, and sockets of other
    families than SOCKET_FAMILIES with EAFNOSUPPORT. A call of another architecture (32 bits, x32)
    kills the process.
    """
    architecture, denied = DENIED_CALLS[platform.machine()]
    kill, allow, deny = 0x80000000, 0x7FFF0000, 0x00050001
    load, equal, at_least, both, ret = 0x20, 0x15, 0x35, 0x54, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, kill)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (ret, 0, 0, kill)]
    for name, index, mask, value in DENIED_VALUES:
        steps += [(equal, 0, 5, CALL_NUMBERS[platform.machine()][name])]
        steps += [(load, 0, 0, 16 + 8 * index), (both, 0, 0, mask), (equal, 0, 1, value)]
        steps += [(ret, 0, 0, deny), (load, 0, 0, 0)]
    steps += [(equal, 0, 4, LIMIT_CALL[platform.machine()]), (load, 0, 0, 16), (equal, 1, 0, 0)]
    steps += [(ret, 0, 0, deny), (load, 0, 0, 0)]
    socket, pair = SOCKET_CALLS[platform.machine()]
    families = len(SOCKET_FAMILIES)
    sockets = [(equal, 1, 0, socket), (equal, 0, families + 2, pair), (load, 0, 0, 16)]
    sockets += [(equal, families - i, 0, family) for i, family in enumerate(SOCKET_FAMILIES)]
    sockets += [(ret, 0, 0, 0x00050000 | NO_SUCH_FAMILY)]
    end = len(denied) + len(sockets)
    steps += [(equal, end - i, 0, number) for i, number in enumerate(denied)]
    steps += [*sockets, (ret, 0, 0, allow), (ret, 0, 0, deny)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    _call("prctl", SECCOMP, 2, ctypes.c_char_p(program), 0, 0)


if __name__ == "__main__":
    main()
