"""`msrl doctor`: what this machine has, what does not fit together, and how to mend it; with a configuration, whether it would run here.

Every finding is made; nothing is started but short processes that import one library each.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.platforms import NAMES, get, resolve
from msrl.platforms.base import Platform
from msrl.workflows.doctor_config import config_findings

Level = Literal["ok", "note", "wrong"]
GB = 10**9
PYTHONS = ">=3.10,<3.14"
_IMPORT_TIMEOUT_S = 300.0
_LEAST_DISK_GB, _LEAST_SHM_GB, _LEAST_FILES = 5.0, 1.0, 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `text` says what is there and, where it is wrong, how to mend it."""

    level: Level
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5}  {self.what}: {self.text}"


def run(platform_name: str, *, resolved: Resolved | None, mistakes: Sequence[str], command: str | None, imports: bool) -> list[Finding]:
    """All findings, in the order of what depends on what. `mistakes` are those that reading the configuration gave."""
    findings = [_python(), *_platforms(platform_name)]
    platform = _platform(platform_name)
    if platform is not None:
        findings += [*_versions(platform), *_devices(platform)]
        if imports:
            findings += _imports(platform)
    findings += [*_room(resolved), *_limits(platform), *_ports()]
    findings += [Finding("wrong", "configuration", line) for line in mistakes]
    if resolved is not None:
        findings += [Finding(level, what, text) for level, what, text in config_findings(resolved, command, platform)]
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = SpecifierSet(PYTHONS).contains(version)
    return Finding("ok" if fits else "wrong", "Python", version if fits else f"{version}; msrl runs on {PYTHONS}")


def _platforms(wanted: str) -> Iterator[Finding]:
    """The platform that a run takes, and why the others are not it."""
    try:
        chosen = resolve(wanted)
    except MsrlError as error:
        yield Finding("wrong", "platform", str(error))
        chosen = None
    if chosen is not None:
        missing = chosen.missing()
        yield Finding("wrong" if missing else "ok", "platform", f"{chosen.name}: {missing}" if missing else chosen.name)
    for name in NAMES:
        missing = get(name).missing() if chosen is not None and wanted == "auto" else None
        if missing:
            yield Finding("note", f"platform {name}", missing)


def _platform(wanted: str) -> Platform | None:
    try:
        return resolve(wanted)
    except MsrlError:
        return None


def _versions(platform: Platform) -> Iterator[Finding]:
    """The installed versions against those that are known to fit together."""
    for package, wanted in platform.stack.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(
                "wrong", package, f"not installed; {package}{wanted} fits: pip install 'msrl[{platform.name}]' (see docs/installation.md)"
            )
            continue
        fits = SpecifierSet(wanted).contains(found, prereleases=True)
        yield Finding("ok" if fits else "note", package, found if fits else f"{found}; tried and known to fit: {wanted}")


def _devices(platform: Platform) -> Iterator[Finding]:
    count = platform.device_count()
    memory = platform.memory_bytes()
    each = "the machine's memory" if platform.shares_main_memory else "each"
    text = f"{count} of {platform.name}" + (f", {memory / GB:.1f} GB {each}" if memory else "")
    yield Finding("ok" if count else "wrong", "devices", text if count else f"{text}: none answers; look at the driver's own tool")


def _imports(platform: Platform) -> list[Finding]:
    """Each library in a process of its own, two at a time: one that breaks does not hide the others."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: _import(platform, name), platform.libraries))


def _import(platform: Platform, name: str) -> Finding:
    prepare = f"from msrl.platforms import get; get({platform.name!r}).prepare(); " if name.startswith("megatron") else ""
    environment = {**os.environ, **platform.engine_environment(), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{prepare}import {name}"],
            capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("wrong", f"import {name}", f"takes more than {_IMPORT_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Finding("ok", f"import {name}", "works")
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return Finding("wrong", f"import {name}", f"{last}; see `python -c 'import {name}'`, and the versions above")


def _room(resolved: Resolved | None) -> Iterator[Finding]:
    """Room on the disks that a run writes to, and in shared memory."""
    run_dir = Path(resolved.config.run.dir) if resolved is not None else Path("runs")
    existing = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    for what, path, least in (
        ("disk of runs", existing, _LEAST_DISK_GB),
        ("disk of Ray's files", Path(os.environ.get("RAY_TMPDIR", "/tmp")), _LEAST_DISK_GB),
        ("shared memory", Path("/dev/shm"), _LEAST_SHM_GB),
    ):
        if not path.exists():
            yield Finding("note", what, f"{path} is not there")
            continue
        free = shutil.disk_usage(path).free / GB
        if what == "shared memory":
            text = f"{free:.1f} GB free in {path}; Ray and NCCL want {least:g} GB (docker: --shm-size, --ipc=host)"
        else:
            text = f"{free:.1f} GB free in {path}; a checkpoint of 7B parameters with its optimizer takes 100 GB"
        yield Finding("ok" if free >= least else "note", what, f"{free:.1f} GB free in {path}" if free >= least else text)


def _limits(platform: Platform | None) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    yield Finding("ok" if enough else "note", "open files", f"{files}" if enough else f"{files}; Ray wants more: ulimit -n 65536")
    if platform is not None and platform.shares_main_memory:
        absent = [name for name in ("gcc", "g++") if shutil.which(name) is None]
        text = f"{' and '.join(absent)} not found; vLLM on CPU compiles its kernels: apt install gcc g++"
        yield Finding("wrong" if absent else "ok", "compiler", text if absent else "gcc, g++")


def _ports() -> Iterator[Finding]:
    """The ports of `msrl cluster up`; taken is no fault where a cluster is up."""
    from msrl.cluster.launch import head_record
    from msrl.cluster.probe import LOOPBACK, check_port_free

    up = head_record() is not None
    for port, flag in ((6344, "--port"), (8260, "--dashboard-port")):
        try:
            check_port_free(LOOPBACK, port, flag=flag)
            yield Finding("ok", f"port {port}", "free")
        except MsrlError as error:
            yield Finding("ok" if up else "note", f"port {port}", "in use by the cluster that is up" if up else str(error))
