"""Sandbox for untrusted Python programs.

`run` runs a program, and `refusal` returns the reason if this machine cannot run a sandbox. A
program sees a read-only /usr and Python and a private, empty /tmp in memory (an interpreter below
/tmp is visible there). It sees nothing else of the machine: no other files, no network, no other
processes, no privileges. The program and its child processes are killed at the limits of `Limits`.
`sandbox_init.py` is the process inside the sandbox.
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
_MAX_LINKS = 40  # the kernel's limit
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
Status = Literal["ok", "error", "timeout", "memory", "output"]


class SandboxRefusedError(RuntimeError):
    """This machine does not support the sandbox; the message names the step that failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program.

    `case_s` is the wall-clock limit of one input, `total_s` the limit of all inputs. `memory_bytes`
    limits the memory of all its processes together, with their pipes and Unix sockets as if full.
    `files_bytes` limits its files and shared memory.
    """

    case_s: float = 4.0
    total_s: float = 20.0
    memory_bytes: int = 512 << 20
    processes: int = 16
    files_bytes: int = 8 << 20
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Result of one input.

    The status `ok` means exit code 0; `output` and `memory` name the exceeded limit.
    """

    status: Status
    stdout: str
    stderr: str = ""


def run(
    program: str,
    inputs: Sequence[str],
    limits: Limits,
    *,
    stop: bool = False,
    python: str | None = None,
) -> tuple[Case, ...]:
    """Run a Python program once for each standard input.

    Args:
        program: Source text.
        inputs: Standard input of each case. The cases share the program's /tmp.
        limits: Limits of time, memory, processes and output.
        stop: Stop after the first case that is not ok.
        python: Interpreter; None uses this one.

    Raises:
        SandboxRefusedError: This machine does not support the sandbox.
    """
    python = _absolute(python) if python else sys.executable
    job = {
        "program": program,
        "inputs": list(inputs),
        "stop": stop,
        "python": python,
        "binds": _binds(python),
        "case_s": limits.case_s,
        "total_s": limits.total_s,
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "files_bytes": limits.files_bytes,
        "output_bytes": limits.output_bytes,
    }
    answer = _launch(json.dumps(job), limits.total_s + GRACE_S)
    if answer is None:
        return (Case("timeout", ""),)
    if "refused" in answer:
        raise SandboxRefusedError(answer["refused"])
    return tuple(map(_decode_case, answer["cases"]))


def _decode_case(case: dict) -> Case:
    stdout = base64.b64decode(case["stdout"]).decode("utf-8", "replace")
    return Case(case["status"], stdout, case["stderr"])


def _launch(job: str, timeout_s: float) -> dict | None:
    """Return the answer of the sandbox process, or None if it was killed at the timeout."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_init.py"))]
    pipe, environment = subprocess.PIPE, {"LANG": "C.UTF-8"}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd="/"
    ) as process:
        try:
            out, err = process.communicate(job.encode("utf-8", "surrogatepass"), timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
    if not out:
        tail = err.decode("utf-8", "replace")[-500:].strip()
        raise SandboxRefusedError(f"the sandbox process ended without an answer: {tail}")
    return json.loads(out)


@functools.cache
def refusal(python: str | None = None) -> str | None:
    """Run a test program; return the reason if no sandbox is available here, else None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the sandbox does not support {sys.platform} on {platform.machine()}"
    try:
        (case,) = run("print(6 * 7)", [""], Limits(case_s=20.0), python=python)
    except (SandboxRefusedError, OSError) as error:
        return f"this machine allows no namespaces: {error}"
    if case.stdout == "42\n":
        return None
    reason = case.stderr.strip() or case.status
    return f"the sandbox cannot run {python or sys.executable}: {reason}"


def _binds(python: str) -> list[str]:
    """Return the folders of the system and of the interpreter to show inside the sandbox.

    No path is inside another one. Links to folders are returned as links.
    """
    folders = _prefixes(python)
    interpreter = {*_resolve_links(python), *folders, *map(os.path.realpath, folders)}
    existing = {path for path in (*_SYSTEM, *interpreter) if os.path.lexists(path)}
    binds: list[str] = []
    for path in sorted(existing, key=len):
        if not any(path.startswith(parent.rstrip("/") + "/") for parent in binds):
            binds.append(path)
    return binds


def _absolute(python: str) -> str:
    """Return the absolute path of an interpreter from its name or path, without resolving links."""
    return os.path.normpath(Path(shutil.which(python) or python).absolute())


def _resolve_links(path: str) -> list[str]:
    """Return a path, the targets of its chain of links in order, and its real path."""
    chain = [Path(path)]
    while chain[-1].is_symlink() and len(chain) <= _MAX_LINKS:
        chain.append(Path(os.path.normpath(chain[-1].parent / chain[-1].readlink())))
    return [*map(str, chain), os.path.realpath(path)]


@functools.cache
def _prefixes(python: str) -> tuple[str, ...]:
    """Return the prefixes of an interpreter's environment and of its base installation."""
    if python == sys.executable:
        return (sys.prefix, sys.base_prefix)
    code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    command = [python, "-I", "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60.0)
    return tuple(done.stdout.split("\n")[:2]) if done.returncode == 0 else ()
