"""Findings about the software stack of an Ascend NPU, for `msrl doctor`.

Each check looks at recorded facts only, so that it can be tested without an NPU. A finding names
the command that shows the fact and the remedy. File names come from CANN 8 and 9 and from the
driver package (hiascend.com, software installation, "File Paths").
"""

from __future__ import annotations

import os
import platform as machine
import re
import resource
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from msrl.limits import whole_number
from msrl.platforms.base import Diagnosis

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
RESERVED_PORTS = "/proc/sys/net/ipv4/ip_local_reserved_ports"
NPU_SMI = "npu-smi info"
PACKAGES = ("torch", "torch-npu", "mindspeed", "vllm", "vllm-ascend")
CANN = "9.1"
MINDSPEED = "0.16"
FIRST_PORT, NUM_PORTS = 60000, 256  # of trainers and engines, see npu.py
_TIMEOUT_S = 30.0
_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_GUIDE = "See docs/installation.md."

# Return codes of the driver's library, which npu-smi prints.
_CONTAINER = "pass its devices and mount /usr/local/dcmi and /usr/local/Ascend/driver"
_DCMI = {
    "-8005": "the driver is not loaded, or this user may not use the devices. Reboot after a new "
    f"driver or firmware. Run: usermod -aG HwHiAiUser USER. In a container, {_CONTAINER}",
    "-8020": "another container uses the devices, or this one lacks files of the driver. "
    f"In a container, {_CONTAINER}",
    "-9005": f"this container lacks files of the driver: {_CONTAINER}",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Recorded state of a machine. A file, package or output that does not exist is absent."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    locked_bytes: int | None = None  # limit of locked memory, None if there is none


def read_facts() -> Facts:
    """Return the facts of this machine."""
    environment = dict(os.environ)
    paths = (DRIVER, FIRMWARE, PORT_RANGE, RESERVED_PORTS, *_cann_files(environment))
    files = {path: text for path in paths if (text := _read(path)) is not None}
    output = _run(NPU_SMI)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        environment,
        files,
        {} if output is None else {NPU_SMI: output},
        {name: version for name in PACKAGES if (version := _version(name)) is not None},
        None if locked == resource.RLIM_INFINITY else locked,
    )


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return the findings of all checks, ordered by dependency."""
    return [finding for check in _CHECKS for finding in check(facts)]


def _cann_files(environment: Mapping[str, str]) -> tuple[str, ...]:
    home = _cann_home(environment)
    return () if not home else (*_toolkit_files(home), *_kernel_files(home))


def _toolkit_files(home: str) -> tuple[str, ...]:
    """Return the files that can name the version of the toolkit, in order of precedence."""
    name = "ascend_toolkit_install.info"
    return f"{home}/{machine.machine()}-linux/{name}", f"{home}/share/info/{name}"


def _kernel_files(home: str) -> tuple[str, ...]:
    """Return the files that can name the version of the operators, in order of precedence."""
    ops = f"{home}/{machine.machine()}-linux/ascend_ops_install.info"
    return f"{home}/opp/version.info", ops


def _cann_home(environment: Mapping[str, str]) -> str:
    return environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME") or ""


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _run(command: str) -> str | None:
    """Return the output of a command, or None if it does not exist or does not end."""
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _value(text: str, key: str) -> str | None:
    """Return a value of a version file, which has lines such as `Version=25.5.0`."""
    match = re.search(rf"^{key}\s*[=:]\s*\[?([^\]\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return None if match is None else match[1]


def _first_value(text: str, *keys: str) -> str | None:
    """Return the value of the first of these keys that a version file has."""
    return next((value for key in keys if (value := _value(text, key)) is not None), None)


def _first_file(facts: Facts, paths: tuple[str, ...]) -> str:
    """Return the first of these files that exists, or the first name."""
    return next((path for path in paths if path in facts.files), paths[0])


def _check_file(facts: Facts, what: str, path: str, remedy: str) -> Iterator[Diagnosis]:
    # If a file has both, `Version` is the version of a component.
    version = _first_value(facts.files.get(path, ""), "package_version", "Version")
    if version is None:
        yield Diagnosis("wrong", what, f"not found (cat {path}). {remedy}")
    else:
        yield Diagnosis("ok", what, version)


def _check_driver(facts: Facts) -> Iterator[Diagnosis]:
    remedy = "Install the driver package of the device, or mount /usr/local/Ascend/driver"
    yield from _check_file(facts, "driver", DRIVER, f"{remedy} into the container.")


def _check_firmware(facts: Facts) -> Iterator[Diagnosis]:
    if FIRMWARE not in facts.files and DRIVER in facts.files:
        text = f"not visible (cat {FIRMWARE}). Containers need only the driver."
        yield Diagnosis("note", "firmware", text)
    else:
        remedy = "Install the firmware package of the device after the driver."
        yield from _check_file(facts, "firmware", FIRMWARE, remedy)


# | 0     910B4-1             | OK            | 93.7        43                0    / 0  |
# The second chip of an A3 device has "-" for its power, and some devices have NA.
_DEVICE = re.compile(r"^\|\s*(\d+)\s+([\w-]+)\s*\|\s*([A-Za-z]+)\s*\|\s*(?:[\d.]+|-|NA)\s", re.M)


def _check_devices(facts: Facts) -> Iterator[Diagnosis]:
    output = facts.outputs.get(NPU_SMI)
    if output is None:
        text = f"{NPU_SMI} does not run. Install the driver, and add /usr/local/sbin to PATH."
        yield Diagnosis("wrong", "npu-smi", text)
        return
    code = re.search(r"ret is (-\d+)", output)
    if code is not None:
        cause = _DCMI.get(code[1], "see dmesg for the driver's error")
        yield Diagnosis("wrong", "npu-smi", f"{NPU_SMI} fails with {code[1]}: {cause}.")
        return
    rows = _DEVICE.findall(output)
    sick = [f"NPU {number} ({name}): {health}" for number, name, health in rows if health != "OK"]
    if sick:
        text = f"{', '.join(sick)} ({NPU_SMI}). Run npu-smi info -t health -i NUMBER for the cause."
        yield Diagnosis("wrong", "npu-smi", text)
    elif not rows:
        yield Diagnosis("wrong", "npu-smi", f"{NPU_SMI} lists no device. Check lspci and dmesg.")
    else:
        names = ", ".join(sorted({name for _, name, _ in rows}))
        yield Diagnosis("ok", "npu-smi", f"{len(rows)} of {names}, all healthy")


def _check_cann(facts: Facts) -> Iterator[Diagnosis]:
    home = _cann_home(facts.environment)
    if not home:
        text = f"ASCEND_HOME_PATH is not set (env | grep ASCEND). Run: {_SET_ENV}"
        yield Diagnosis("wrong", "CANN", text)
        return
    toolkit = _first_file(facts, _toolkit_files(home))
    version = _value(facts.files.get(toolkit, ""), "version")
    if version is None:
        text = f"no version (cat {toolkit}). Install the toolkit of CANN {CANN}, then: {_SET_ENV}"
        yield Diagnosis("wrong", "CANN", text)
        return
    fits = version.startswith(CANN)
    advice = "" if fits else f"; tested versions: {CANN}. {_GUIDE}"
    yield Diagnosis("ok" if fits else "note", "CANN", f"{version}{advice}")
    kernels = _first_file(facts, _kernel_files(home))
    yield from _check_kernels(facts.files.get(kernels, ""), kernels, version)


def _check_kernels(text: str, path: str, version: str) -> Iterator[Diagnosis]:
    """Compare the version of the operators with the version of the toolkit."""
    kernels = _first_value(text, "version_dir", "Version")  # CANN 8: `Version` of a component
    if kernels is None:
        problem = f"not found (cat {path}). Install the operator package of the device"
        yield Diagnosis("wrong", "CANN kernels", f"{problem} with CANN {version}.")
    elif kernels.split(".")[:2] != version.split(".")[:2]:
        problem = f"{kernels}, but CANN is {version} (cat {path})"
        yield Diagnosis("wrong", "CANN kernels", f"{problem}. Install both from one release.")
    else:
        yield Diagnosis("ok", "CANN kernels", kernels)


def _check_nnal(facts: Facts) -> Iterator[Diagnosis]:
    if facts.environment.get("ATB_HOME_PATH"):
        yield Diagnosis("ok", "NNAL", facts.environment["ATB_HOME_PATH"])
    else:
        remedy = "Run: source /usr/local/Ascend/nnal/atb/set_env.sh"
        text = f"ATB_HOME_PATH is not set (env | grep ATB). vllm-ascend needs it. {remedy}"
        yield Diagnosis("wrong", "NNAL", text)


def _check_torch(facts: Facts) -> Iterator[Diagnosis]:
    torch, torch_npu = facts.packages.get("torch"), facts.packages.get("torch-npu")
    if torch_npu is None or torch is None:
        return  # the versions of the stack report it
    if torch.split("+")[0] != _release(torch_npu):
        text = f"{torch_npu} is built for torch {_release(torch_npu)}, but torch is {torch} "
        remedy = f"Run: pip install torch=={_release(torch_npu)}"
        yield Diagnosis("wrong", "torch_npu build", f"{text}(pip show torch torch-npu). {remedy}")
    else:
        yield Diagnosis("ok", "torch_npu build", f"for torch {_release(torch_npu)}")


def _check_mindspeed(facts: Facts) -> Iterator[Diagnosis]:
    version = facts.packages.get("mindspeed")
    if version is None:
        text = f"not installed (pip show mindspeed). Install its branch core_r0.16.0. {_GUIDE}"
        yield Diagnosis("wrong", "MindSpeed", text)
    elif not version.startswith(f"{MINDSPEED}."):
        text = f"{version} is for another Megatron (pip show mindspeed). Run in its folder: "
        yield Diagnosis("wrong", "MindSpeed", f"{text}git checkout core_r0.16.0")
    else:
        yield Diagnosis("ok", "MindSpeed", version)


def _check_vllm(facts: Facts) -> Iterator[Diagnosis]:
    vllm, ascend = facts.packages.get("vllm"), facts.packages.get("vllm-ascend")
    if ascend is None:
        text = f"not installed (pip show vllm-ascend). vLLM finds no NPU without it. {_GUIDE}"
        yield Diagnosis("wrong", "vllm-ascend", text)
    elif vllm is not None and _release(vllm) != _release(ascend):
        text = f"{ascend} does not fit vLLM {vllm} (pip show vllm vllm-ascend). Install the same"
        yield Diagnosis("wrong", "vllm-ascend", f"{text} release of both.")
    else:
        yield Diagnosis("ok", "vllm-ascend", ascend)


def _release(version: str) -> str:
    """Return major, minor and patch of a version."""
    match = re.match(r"\d+(?:\.\d+){0,2}", version)
    return version if match is None else match[0]


def _check_ports(facts: Facts) -> Iterator[Diagnosis]:
    """Check that the system gives none of HCCL's ports to other connections."""
    number = whole_number(facts.environment.get("HCCL_IF_BASE_PORT", ""))
    first = FIRST_PORT if number is None else number
    last = first + NUM_PORTS - 1
    bounds = [int(number) for number in facts.files.get(PORT_RANGE, "").split()]
    is_shared = len(bounds) == 2 and first <= bounds[1] and last >= bounds[0]
    if is_shared and not _covers(facts.files.get(RESERVED_PORTS, ""), first, last):
        problem = f"the system may use ports {first}-{last} of HCCL (sysctl net.ipv4)"
        remedy = f"Run: sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last}"
        yield Diagnosis("note", "HCCL ports", f"{problem}. {remedy}")
    else:
        yield Diagnosis("ok", "HCCL ports", f"{first}-{last}")


def _covers(reserved: str, first: int, last: int) -> bool:
    """Return True if one of the ranges, such as `60000-60255,61000`, has all ports."""
    ranges = [text.strip().partition("-") for text in reserved.split(",") if text.strip()]
    return any(int(a) <= first and last <= int(b or a) for a, _, b in ranges)


def _check_limits(facts: Facts) -> Iterator[Diagnosis]:
    if facts.locked_bytes is None:
        yield Diagnosis("ok", "locked memory", "unlimited")
    else:
        text = f"{facts.locked_bytes // 1024} KB (ulimit -l): pinned memory may fail. Run: "
        yield Diagnosis("note", "locked memory", f"{text}ulimit -l unlimited")


def _check_allocator(facts: Facts) -> Iterator[Diagnosis]:
    if "expandable_segments:True" in facts.environment.get("PYTORCH_NPU_ALLOC_CONF", ""):
        text = "expandable segments are used by training ranks only; engines that sleep drop them"
        yield Diagnosis("note", "PYTORCH_NPU_ALLOC_CONF", text)


_CHECKS: tuple[Callable[[Facts], Iterator[Diagnosis]], ...] = (
    _check_driver,
    _check_firmware,
    _check_devices,
    _check_cann,
    _check_nnal,
    _check_torch,
    _check_mindspeed,
    _check_vllm,
    _check_ports,
    _check_limits,
    _check_allocator,
)
