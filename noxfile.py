"""Set-up and checks: `nox -s NAME`. A session installs what it needs into the environment that nox itself runs in.

That environment is meant to be `.venv`, made by the README's one-line commands; both commands share it. A stamp in it remembers
what was installed, so that a warm environment starts at once. PyTorch's own CPU index is asked only where pip, as this machine
configures it, would not find a CPU build by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PEERS_DIR = ROOT / "../shared/bench"
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Their builds follow another torch than the CPU one, and then `import vllm` fails; text needs none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# Two threads that spin on two busy cores cost ten times what one costs.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}

# What the largest test files hold at once: ranks, an engine, verifiers and a Ray of their own.
BYTES_PER_WORKER = 6 << 30
MOST_WORKERS = 8

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "layers", "tests"]


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main job in small: from a random model to one that learnt arithmetic by GRPO, through the real commands."""
    install(session, "cpu,dev")
    python(session, "examples/quickstart/run.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests but the whole tables; given 15 minutes on two cores."""
    install(session, "cpu,dev")
    python(
        session,
        "-m",
        "pytest",
        "-m",
        "not full",
        "--session-timeout=3600",
        *side_by_side(),
        *session.posargs,
    )


@nox.session
def fast(session: nox.Session) -> None:
    """Run the tests that start no ranks, engines or clusters; less than 4 minutes on two cores."""
    install(session, "cpu,dev")
    python(
        session, "-m", "pytest", "-m", "not slow and not full", *side_by_side(), *session.posargs
    )


@nox.session
def full(session: nox.Session) -> None:
    """Every test, the whole tables too."""
    install(session, "cpu,dev")
    python(session, "-m", "pytest", *side_by_side(), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    install(session, "lint")
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """pyright: strict on the light packages."""
    install(session, "cpu,dev")
    python(session, "-m", "pyright", "--pythonpath", sys.executable, *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """import-linter: imports go down only, and the light packages stay light."""
    install(session, "lint")
    python(
        session,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())",
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Ours beside the peers, in turn: `nox -s bench -- [NAME...] [--rounds N] [--write]`; `-- device`: this machine's accelerator."""
    if session.posargs[:1] == [
        "device"
    ]:  # in the environment as it is: ours would bring a torch for the CPU
        session.run(sys.executable, "-m", "benchmarks", *session.posargs, env=QUIET)
        return
    install(session, "cpu,dev")
    peers = Path(os.environ.get("MSRL_PEERS", ROOT / ".nox" / "peers"))
    install_peers(session, peers)
    session.run(
        sys.executable, "-m", "benchmarks", "--peers", str(peers), *session.posargs, env=QUIET
    )


@nox.session
def learning(session: nox.Session) -> None:
    """Does every preset learn the quickstart's task: `nox -s learning -- [PRESET...] [--seeds N...]`; goes on where it was stopped."""
    install(session, "cpu,dev")
    python(session, "-m", "benchmarks.learning", *session.posargs)


def python(session: nox.Session, *args: str) -> None:
    """Runs this environment's Python, offline and with one quiet thread per process."""
    session.run(sys.executable, *args, env=QUIET | ONE_THREAD)


def side_by_side() -> tuple[str, ...]:
    """pytest-xdist's options for as many workers as cores and memory allow. A file stays with one, which starts its ranks once."""
    if sys.platform != "linux":
        return ()
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)), free_bytes() // BYTES_PER_WORKER)
    return (
        ("-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder") if workers > 1 else ()
    )


def free_bytes() -> int:
    """Memory that can be had without swapping, within the limit of a container (cgroup v2) where there is one."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text().strip() if limit.exists() else "max"
    return min(free, int(given)) if given.isdecimal() else free


def install(session: nox.Session, extras: str) -> None:
    """Installs msrl (editable) with these extras, unless the stamp says that just this is installed."""
    if sys.prefix == sys.base_prefix:
        session.error(
            "nox runs in the system's Python; run the README's command, which makes .venv first"
        )
    cpu = "cpu" in extras.split(",")
    if cpu and not (3, 11) <= sys.version_info[:2] <= (3, 13):
        found = sys.version.split()[0]
        session.error(
            f"the CPU build of vLLM needs Python 3.11 to 3.13, and this is {found}: make .venv with one of those"
        )
    if any(is_stamped(name) for name in {extras, "cpu,dev"}):
        return
    update_pip(session)
    pip(session, "install", "-q", "-e", f".[{extras}]", *(torch_index(session) if cpu else ()))
    if cpu:
        pip(session, "uninstall", "-q", "-y", *UNWANTED)
    stamp(extras).write_text(fingerprint(extras))


def install_peers(session: nox.Session, folder: Path) -> None:
    """The environment of what we are compared with: its own, since its transformers is another."""
    requirements = (ROOT / "benchmarks" / "peers.txt").read_text()
    done = folder / "msrl-peers.stamp"
    if not PEERS_DIR.exists() or (done.exists() and done.read_text() == requirements):
        return
    session.run(sys.executable, "-m", "venv", str(folder))
    index = torch_index(session)
    session.run(
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "-r",
        "benchmarks/peers.txt",
        *index,
    )
    done.write_text(requirements)


def pip(session: nox.Session, *args: str) -> None:
    """Runs this environment's pip."""
    session.run(sys.executable, "-m", "pip", *args, env={"PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def update_pip(session: nox.Session) -> None:
    """A pip that can report what it would install (22.2 and later); some systems make environments with an older one."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], check=True, capture_output=True, text=True
    ).stdout
    if tuple(int(part) for part in shown.split()[1].split(".")[:2]) < (22, 2):
        pip(session, "install", "-q", "--upgrade", "pip>=23")


def torch_index(session: nox.Session) -> tuple[str, ...]:
    """The options that make pip find a CPU build of torch: none where it would take one anyway."""
    if sys.platform != "linux" or offered_torch().endswith("+cpu"):
        return ()
    session.log(f"pip would take a torch for accelerators here; adding {CPU_INDEX}")
    return ("--extra-index-url", CPU_INDEX)


def offered_torch() -> str:
    """The version of torch that pip would install on this machine, from metadata alone; '' where it finds none."""
    report = [
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "-q",
        "--report",
        "-",
        TORCH,
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *report], capture_output=True, text=True)
    if done.returncode:
        return ""
    text = done.stdout[done.stdout.index("{") :]
    return str(json.loads(text)["install"][0]["metadata"]["version"])


def stamp(extras: str) -> Path:
    return Path(sys.prefix) / f"msrl-{extras.replace(',', '-')}.stamp"


def is_stamped(extras: str) -> bool:
    return stamp(extras).exists() and stamp(extras).read_text() == fingerprint(extras)


def fingerprint(extras: str) -> str:
    """What an installation depends on: this folder, the interpreter, and what pyproject.toml says about the project."""
    pyproject = nox.project.load_toml(ROOT / "pyproject.toml")
    facts = [str(ROOT), sys.version, extras, TORCH, pyproject["project"], pyproject["build-system"]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
