"""Programs that nobody has read, run where they can do no harm: `run` and, before that, `refusal`, why this machine cannot.

A program sees a read-only /usr and Python, a /tmp of its own in memory (empty, but for a Python that lies below /tmp), and nothing else of
the machine: no other files, no network, no other processes, no privileges. It, and all that it starts, ends at the limits of `Limits`.
`sandbox_init.py` is the inside.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GRACE_S = 5.0
_MAX_LINKS = 40  # as many as the kernel follows
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
Status = Literal["ok", "error", "timeout", "memory", "output"]


class SandboxRefusedError(RuntimeError):
    """This machine gives no sandbox; the message says which step it refused."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may take. `case_s` is for one input, `total_s` for all, by the clock; `memory_bytes` is for all its processes."""

    case_s: float = 4.0
    total_s: float = 20.0
    memory_bytes: int = 512 << 20
    processes: int = 16
    files_bytes: int = 8 << 20
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What became of one input. `ok` is an exit code of 0; `output` and `memory` name the limit that was passed."""

    status: Status
    stdout: str
    stderr: str = ""


def run(program: str, inputs: Sequence[str], limits: Limits, *, stop: bool = False, python: str | None = None) -> tuple[Case, ...]:
    """Run a Python program once for each standard input. With `stop`, the cases end with the first that is not ok.

    The cases share the program's /tmp. `python`: the interpreter; unset: this one. Raises SandboxRefusedError.
    """
    python = _absolute(python) if python else sys.executable
    job = {
        "program": program, "inputs": list(inputs), "stop": stop, "python": python, "binds": _binds(python), "case_s": limits.case_s,
        "total_s": limits.total_s, "memory_bytes": limits.memory_bytes, "processes": limits.processes, "files_bytes": limits.files_bytes,
        "output_bytes": limits.output_bytes,
    }  # fmt: skip
    answer = _launched(json.dumps(job), limits.total_s + GRACE_S)
    if answer is None:
        return (Case("timeout", ""),)
    if "refused" in answer:
        raise SandboxRefusedError(answer["refused"])
    return tuple(Case(c["status"], base64.b64decode(c["stdout"]).decode("utf-8", "replace"), c["stderr"]) for c in answer["cases"])


def _launched(job: str, timeout_s: float) -> dict | None:
    """What the inside answered; None if it did not in time and was killed, with all in it."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_init.py"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={"LANG": "C.UTF-8"}, cwd="/") as process:
        try:
            out, err = process.communicate(job.encode("utf-8", "surrogatepass"), timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
    if not out:
        raise SandboxRefusedError(f"it ended without an answer: {err.decode('utf-8', 'replace')[-500:].strip()}")
    return json.loads(out)


@functools.cache
def refusal(python: str | None = None) -> str | None:
    """Why no program can be run safely here, found out by running one; None where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"there is no sandbox for {sys.platform} on {platform.machine()}"
    try:
        (case,) = run("print(6 * 7)", [""], Limits(case_s=20.0), python=python)
    except (SandboxRefusedError, OSError) as error:
        return f"this machine gives no namespaces for a sandbox: {error}"
    return None if case.stdout == "42\n" else f"the sandbox cannot run {python or sys.executable}: {case.stderr.strip() or case.status}"


def _binds(python: str) -> list[str]:
    """The system's programs and libraries and the interpreter's folders, none inside another; a link to a folder stands for it."""
    folders = _prefixes(python)
    own = {*_hops(python), *folders, *map(os.path.realpath, folders)}
    wanted = sorted({path for path in (*_SYSTEM, *own) if os.path.lexists(path)}, key=len)
    chosen: list[str] = []
    for path in wanted:
        if not any(path.startswith(parent.rstrip("/") + "/") for parent in chosen):
            chosen.append(path)
    return chosen


def _absolute(python: str) -> str:
    """Where an interpreter is that may be given by its name alone, or from here; links stay."""
    return os.path.normpath(Path(shutil.which(python) or python).absolute())


def _hops(path: str) -> list[str]:
    """A file and those that it leads to, link by link, to the last that is none."""
    hops = [Path(path)]
    while hops[-1].is_symlink() and len(hops) <= _MAX_LINKS:
        hops.append(Path(os.path.normpath(hops[-1].parent / hops[-1].readlink())))
    return [*map(str, hops), os.path.realpath(path)]


@functools.cache
def _prefixes(python: str) -> tuple[str, ...]:
    """Where the interpreter's libraries are: its environment's and its base's."""
    if python == sys.executable:
        return (sys.prefix, sys.base_prefix)
    code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    done = subprocess.run([python, "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=60.0)
    return tuple(done.stdout.split("\n")[:2]) if done.returncode == 0 else ()
