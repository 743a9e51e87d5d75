"""Simulated Ascend NPUs: build the runtime and run a Python command with the real torch_npu on it.

`python tests/npu/simulator.py --packages FOLDER -m pytest tests/npu` compiles the libraries once,
into a folder of the user's cache, and replaces itself by the command. FOLDER contains torch_npu,
outside of the environment's packages: without CANN, `import torch` would fail with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Replaces MindSpeed's adaptor where MINDSPEED_HOME names no checkout.
STAND_IN = HERE / "mindspeed_stand_in"
ENABLED = "NPU_SIM_HOME"  # the variable that tells a process that it runs on the simulator
RUNTIME_SOURCES = ("device.cpp", "stream.cpp", "hccl.cpp", "unsupported.c")
RUNTIME = "libascendcl.so"
# The other libraries that torch_npu links or loads. They are links to the runtime.
ALIASES = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
KERNELS = "libnpu_kernels.so"
FLAGS = ("-O1", "-fPIC", "-Wall")
NUM_DEVICES = 8


def main(arguments: list[str]) -> None:
    """Build the simulator and run Python with the rest of the arguments."""
    if arguments[:1] != ["--packages"] or len(arguments) < 3:
        sys.exit("usage: simulator.py --packages FOLDER PYTHON-ARGUMENTS...")
    packages = Path(arguments[1]).resolve()
    home = build(packages)
    command = [sys.executable, *arguments[2:]]
    os.execve(sys.executable, command, {**os.environ, **environment(packages, home)})


def environment(packages: Path, home: Path) -> dict[str, str]:
    """Return the variables of a process that uses the simulator."""
    ascend = home / "ascend"
    mindspeed = os.environ.get("MINDSPEED_HOME") or STAND_IN
    for name in (
        "opp",
        "runtime",
        "compiler",
    ):  # torch_npu checks that these packages of CANN exist
        (ascend / name).mkdir(parents=True, exist_ok=True)
    return {
        ENABLED: str(home),
        "LD_LIBRARY_PATH": _joined(home / "lib", os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(HERE / "site", packages, mindspeed, os.environ.get("PYTHONPATH")),
        "ASCEND_HOME_PATH": str(ascend),
        "ASCEND_OPP_PATH": str(ascend / "opp"),
        "NPU_SIM_DEVICES": str(NUM_DEVICES),
        # torch 2.13 reads the capability of a device in every broadcast.
        "TORCH_NPU_DEVICE_CAPABILITY": "0.0",
    }


def _joined(*paths: Path | str | None) -> str:
    return os.pathsep.join(str(path) for path in paths if path)


def build(packages: Path) -> Path:
    """Compile the libraries unless the cache has them, and return their folder."""
    torch = _package("torch")
    sources = sorted(path for path in HERE.glob("*/*") if path.suffix in {".h", ".c", ".cpp"})
    home = _cache() / _fingerprint(sources, torch, packages)
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as name:
        folder = Path(name) / "build"
        (folder / "lib").mkdir(parents=True)
        _compile_runtime(folder / "lib", packages / "torch_npu")
        _compile_kernels(folder / "lib", packages / "torch_npu", torch)
        try:
            folder.rename(home)
        except OSError:
            if not home.exists():  # otherwise another process has built it
                raise
    return home


def _compile_runtime(lib: Path, torch_npu: Path) -> None:
    include = f"-I{torch_npu / 'include'}"
    objects: list[str] = []
    for source in RUNTIME_SOURCES:
        compiler = ["gcc"] if source.endswith(".c") else ["g++", "-std=c++17"]
        target = str(lib / f"{source}.o")
        path = str(HERE / "runtime" / source)
        _run(*compiler, *FLAGS, include, "-c", path, "-o", target)
        objects.append(target)
    _run("g++", "-shared", f"-Wl,-soname,{RUNTIME}", *objects, "-pthread", "-o", str(lib / RUNTIME))
    for name in ALIASES:
        (lib / name).symlink_to(RUNTIME)


def _compile_kernels(lib: Path, torch_npu: Path, torch: Path) -> None:
    includes = (
        torch / "include",
        torch / "include" / "torch" / "csrc" / "api" / "include",
        torch_npu / "include",
        Path(sysconfig.get_paths()["include"]),
    )
    libraries = (lib, torch_npu / "lib", torch / "lib")
    _run(
        "g++",
        "-std=c++20",
        *FLAGS,
        "-shared",
        *(f"-I{path}" for path in includes),
        str(HERE / "kernels" / "fallback.cpp"),
        *(f"-L{path}" for path in libraries),
        *("-ltorch_npu", "-ltorch_cpu", "-ltorch", "-lc10", "-lascendcl"),
        *("-Wl,--allow-shlib-undefined", "-o", str(lib / KERNELS)),
    )


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"simulator.py: {name} is not installed for {sys.executable}")
    return Path(spec.origin).parent


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "msrl" / "npu-simulator"


def _fingerprint(sources: Iterable[Path], torch: Path, packages: Path) -> str:
    """Return a hash of everything that the libraries are built from."""
    digest = hashlib.sha256()
    versions = (torch / "version.py", packages / "torch_npu" / "version.py")
    for path in (*sources, *versions):
        digest.update(path.read_bytes())
    facts = (torch, packages, sys.version, FLAGS, RUNTIME, ALIASES, KERNELS)
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]


def is_enabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True in a process that runs on the simulator."""
    return ENABLED in variables


if __name__ == "__main__":
    main(sys.argv[1:])
