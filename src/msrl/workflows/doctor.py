"""`msrl doctor`: report what is installed on this machine, what is incompatible, and how to fix it.

With a configuration, it also reports if the run would work here. All findings are reported. Nothing
is started except short-lived processes that import one library each.
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

from packaging.specifiers import SpecifierSet

from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.platforms import NAMES, get, resolve
from msrl.platforms.base import Level, Platform
from msrl.processes.child import python_command
from msrl.workflows.doctor_config import config_findings

GB = 10**9
PYTHONS = ">=3.10,<3.14"
_IMPORT_TIMEOUT_S = 300.0
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MIN_DISK_GB, _MIN_SHM_GB, _MIN_FILES = 5.0, 1.0, 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `text` describes the state and, if it is wrong, how to fix it."""

    level: Level
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5}  {self.what}: {self.text}"


def run(
    platform_name: str,
    *,
    resolved: Resolved | None,
    mistakes: Sequence[str],
    command: str | None,
    imports: bool,
) -> list[Finding]:
    """Return all findings, ordered by dependency.

    `mistakes` are the errors from reading the configuration.
    """
    findings = [_python(), *_platforms(platform_name)]
    platform = _platform(platform_name)
    selected = get(platform_name) if platform_name in NAMES else platform
    if selected is not None:
        findings += [Finding(row.level, row.what, row.text) for row in selected.diagnose()]
    if platform is not None:
        findings += [*_versions(platform), *_devices(platform)]
        if imports:
            findings += _imports(platform)
    findings += [*_free_space(resolved), *_limits(platform), *_ports()]
    findings += _configured_ports(resolved)
    findings += [Finding("wrong", "configuration", line) for line in mistakes]
    if resolved is not None:
        findings += [
            Finding(level, what, text)
            for level, what, text in config_findings(resolved, command, platform)
        ]
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = SpecifierSet(PYTHONS).contains(version)
    return Finding(
        "ok" if fits else "wrong",
        "Python",
        version if fits else f"{version}: not supported. Install Python {PYTHONS}.",
    )


def _platforms(name: str) -> Iterator[Finding]:
    """Yield the platform that a run uses, and why the other ones are not available."""
    try:
        platform = resolve(name)
    except MsrlError as error:
        yield Finding("wrong", "platform", str(error))
        platform = None
    if platform is not None:
        missing = platform.missing()
        yield Finding(
            "wrong" if missing else "ok",
            "platform",
            f"{platform.name}: {missing}" if missing else platform.name,
        )
    for other in NAMES:
        missing = get(other).missing() if platform is not None and name == "auto" else None
        if missing:
            yield Finding("note", f"platform {other}", missing)


def _platform(name: str) -> Platform | None:
    try:
        return resolve(name)
    except MsrlError:
        return None


def _versions(platform: Platform) -> Iterator[Finding]:
    """Compare the installed versions with those that are known to be compatible."""
    for package, specifier in platform.stack.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(
                "wrong",
                package,
                f"not installed. Install {package}{specifier} with: pip install "
                f"'msrl[{platform.name}]' (see docs/installation.md)",
            )
            continue
        fits = SpecifierSet(specifier).contains(version, prereleases=True)
        yield Finding(
            "ok" if fits else "note",
            package,
            version if fits else f"{version}; tested versions: {specifier}",
        )


def _devices(platform: Platform) -> Iterator[Finding]:
    count = platform.device_count()
    memory = platform.memory_bytes()
    each = "of main memory" if platform.shares_main_memory else "each"
    text = f"{count} of {platform.name}" + (f", {memory / GB:.1f} GB {each}" if memory else "")
    yield Finding(
        "ok" if count else "wrong",
        "devices",
        text if count else f"{text}: no device responds. Check the driver with its tool.",
    )


def _imports(platform: Platform) -> list[Finding]:
    """Import each library in a separate process, two at a time.

    A library that breaks does not hide the result of the other ones.
    """
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: _import(platform, name), platform.libraries))


def _import(platform: Platform, name: str) -> Finding:
    prepare = (
        f"from msrl.platforms import get; get({platform.name!r}).prepare(); "
        if name.startswith("megatron")
        else ""
    )
    environment = {**os.environ, **platform.engine_environment(), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            python_command("-c", f"{prepare}import {name}"),
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("wrong", f"import {name}", f"takes more than {_IMPORT_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Finding("ok", f"import {name}", "works")
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return Finding(
        "wrong",
        f"import {name}",
        f"{last}. Run `python -c 'import {name}'`, and check the versions above.",
    )


def _free_space(resolved: Resolved | None) -> Iterator[Finding]:
    """Yield the free space on the disks that a run writes to, and in shared memory."""
    run_dir = Path(resolved.config.run.dir) if resolved is not None else Path("runs")
    existing = next(
        folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists()
    )
    for what, path, minimum in (
        ("disk of runs", existing, _MIN_DISK_GB),
        ("disk of Ray's files", Path(os.environ.get("RAY_TMPDIR", "/tmp")), _MIN_DISK_GB),
        ("shared memory", Path("/dev/shm"), _MIN_SHM_GB),
    ):
        if not path.exists():
            yield Finding("note", what, f"{path} does not exist")
            continue
        free = shutil.disk_usage(path).free / GB
        if what == "shared memory":
            text = (
                f"{free:.1f} GB free in {path}; Ray and NCCL need {minimum:g} GB (docker: "
                "--shm-size, --ipc=host)"
            )
        else:
            text = (
                f"{free:.1f} GB free in {path}; a checkpoint of 7B parameters with its "
                "optimizer takes 100 GB"
            )
        yield Finding(
            "ok" if free >= minimum else "note",
            what,
            f"{free:.1f} GB free in {path}" if free >= minimum else text,
        )


def _limits(platform: Platform | None) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_enough = files == resource.RLIM_INFINITY or files >= _MIN_FILES
    yield Finding(
        "ok" if is_enough else "note",
        "open files",
        f"{files}" if is_enough else f"{files}; Ray needs more: ulimit -n 65536",
    )
    if platform is not None and platform.shares_main_memory:
        missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
        text = (
            f"{' and '.join(missing)} not found. vLLM on CPU compiles its kernels: apt install "
            "gcc g++"
        )
        yield Finding("wrong" if missing else "ok", "compiler", text if missing else "gcc, g++")


def _ports() -> Iterator[Finding]:
    """Check the ports of `msrl cluster up`; a running cluster may use them."""
    from msrl.cluster.launch import head_record
    from msrl.cluster.probe import LOOPBACK, check_port_free

    is_up = head_record() is not None
    for port, flag in ((6344, "--port"), (8260, "--dashboard-port")):
        try:
            check_port_free(LOOPBACK, port, flag=flag)
            yield Finding("ok", f"port {port}", "free")
        except MsrlError as error:
            yield Finding(
                "ok" if is_up else "note",
                f"port {port}",
                "in use by the cluster that runs here" if is_up else str(error),
            )


def _configured_ports(resolved: Resolved | None) -> Iterator[Finding]:
    """Check the range of `cluster.ports`, and the kernel's range, from which other ports come."""
    from msrl.cluster.launch import recorded_nodes
    from msrl.cluster.ports import Ports
    from msrl.cluster.probe import check_port_free

    low, high = map(int, _LOCAL_PORTS.read_text().split())
    text = f"{low}-{high} (net.ipv4.ip_local_port_range)"
    yield Finding("ok", "ports of collectives", text)
    if resolved is None or resolved.config.cluster.ports is None:
        return
    what = f"cluster.ports {resolved.config.cluster.ports}"
    try:
        ports = Ports.parse(resolved.config.cluster.ports)
    except MsrlError:
        return  # it is among the findings on the configuration
    if ports.first <= high and low <= ports.last:
        text = f"overlaps the kernel's ports {low}-{high}, so some may be in use. Change it."
        yield Finding("note", what, text)
    is_up = any(record.alive for record in recorded_nodes())
    try:
        for port in ports.services:
            check_port_free("0.0.0.0", port, flag="cluster.ports")
        yield Finding("ok", what, "free")
    except MsrlError as error:
        yield Finding(
            "ok" if is_up else "note", what, "in use by the node" if is_up else str(error)
        )
