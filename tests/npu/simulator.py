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
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Replaces MindSpeed's adaptor where MINDSPEED_HOME names no checkout.
STAND_IN = HERE / "mindspeed_stand_in"
NEEDS = "needs-of-mindspeed"  # folder with packages beside torch_npu
ENABLED = "NPU_SIM_KERNELS"  # the variable that tells a process that it runs on the simulator
RUNTIME_SOURCES = ("device.cpp", "stream.cpp", "hccl.cpp", "operators.cpp", "unsupported.c")
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
    mindspeed = os.environ.get("MINDSPEED_HOME")
    if mindspeed and not (Path(mindspeed) / "mindspeed" / "megatron_adaptor.py").is_file():
        sys.exit(f"MINDSPEED_HOME={mindspeed}: not a checkout of MindSpeed core_r0.16.0")
    packages = Path(arguments[1]).resolve()
    variables = environment(packages, *build(packages))
    os.execve(sys.executable, [sys.executable, *arguments[2:]], {**os.environ, **variables})


def environment(packages: Path, runtime: Path, kernels: Path) -> dict[str, str]:
    """Return the variables of a process that uses the simulator."""
    ascend = runtime / "ascend"
    mindspeed = os.environ.get("MINDSPEED_HOME") or STAND_IN
    for name in ("opp", "runtime", "compiler"):  # torch_npu checks that these packages exist
        (ascend / name).mkdir(parents=True, exist_ok=True)
    return {
        ENABLED: str(kernels / KERNELS),
        "LD_LIBRARY_PATH": _join(runtime, os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _join(
            HERE / "site",
            packages,
            packages / NEEDS,  # packages that only MindSpeed needs
            mindspeed,
            os.environ.get("PYTHONPATH"),
        ),
        "ASCEND_HOME_PATH": str(ascend),
        "ASCEND_OPP_PATH": str(ascend / "opp"),
        "NPU_SIM_DEVICES": str(NUM_DEVICES),
        # torch 2.13 reads the capability of a device in every broadcast.
        "TORCH_NPU_DEVICE_CAPABILITY": "0.0",
    }


def _join(*paths: Path | str | None) -> str:
    return os.pathsep.join(str(path) for path in paths if path)


def build(packages: Path) -> tuple[Path, Path]:
    """Compile what the cache lacks, and return the folders of the runtime and the kernels."""
    torch_npu, torch = packages / "torch_npu", _package("torch")
    runtime = _cached_part(
        "runtime", torch_npu, lambda folder: _compile_runtime(folder, torch_npu / "include")
    )
    kernels = _cached_part(
        "kernels", torch_npu, lambda folder: _compile_kernels(folder, runtime, torch_npu, torch)
    )
    return runtime, kernels


def _cached_part(name: str, torch_npu: Path, compile_to: Callable[[Path], None]) -> Path:
    """Return the folder of a part in the cache, which is compiled if it is not there."""
    folder = _cache() / f"{name}-{_fingerprint(name, torch_npu)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        built = Path(temporary) / "build"
        built.mkdir()
        compile_to(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process has built it
                raise
    return folder


def _compile_runtime(folder: Path, include: Path) -> None:
    objects: list[str] = []
    for source in RUNTIME_SOURCES:
        compiler = ["gcc"] if source.endswith(".c") else ["g++", "-std=c++17"]
        target = str(folder / f"{source}.o")
        path = str(HERE / "runtime" / source)
        _run(*compiler, *FLAGS, f"-I{include}", "-c", path, "-o", target)
        objects.append(target)
    library = str(folder / RUNTIME)
    _run("g++", "-shared", f"-Wl,-soname,{RUNTIME}", *objects, "-pthread", "-o", library)
    for name in ALIASES:
        (folder / name).symlink_to(RUNTIME)


def _compile_kernels(folder: Path, runtime: Path, torch_npu: Path, torch: Path) -> None:
    includes = (
        torch / "include",
        torch / "include" / "torch" / "csrc" / "api" / "include",
        torch_npu / "include",
        Path(sysconfig.get_paths()["include"]),
    )
    libraries = (runtime, torch_npu / "lib", torch / "lib")
    _run(
        "g++",
        "-std=c++20",
        *FLAGS,
        "-shared",
        *(f"-isystem{path}" for path in includes),  # their headers have warnings
        str(HERE / "kernels" / "fallback.cpp"),
        *(f"-L{path}" for path in libraries),
        *("-ltorch_npu", "-ltorch_cpu", "-ltorch", "-lc10", "-lascendcl"),
        *("-Wl,--allow-shlib-undefined", "-o", str(folder / KERNELS)),
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


def _fingerprint(name: str, torch_npu: Path) -> str:
    """Return a hash of everything that a part is built from."""
    digest = hashlib.sha256()
    torch = _package("torch")
    sources = sorted(path for path in (HERE / name).iterdir() if path.is_file())
    for path in (*sources, torch / "version.py", torch_npu / "version.py"):
        digest.update(path.read_bytes())
    facts = (torch, torch_npu, sys.version, FLAGS, RUNTIME, ALIASES, KERNELS)
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]


def is_enabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True in a process that runs on the simulator."""
    return ENABLED in variables


if __name__ == "__main__":
    main(sys.argv[1:])
