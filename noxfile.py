"""Setup and checks: `nox -s NAME`. Sessions install their dependencies into nox's own environment.

The README's one-line commands create that environment as `.venv`, and all sessions share it. A
stamp file records what was installed, so a session in a prepared environment starts at once.
PyTorch's CPU index is added only if pip's configured index has no CPU build of torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PEERS_DIR = ROOT / "../shared/bench"
TORCH = "torch==2.13.0"
TORCH_NPU = "torch_npu==2.13.0"  # the release for TORCH; NPUs themselves use 2.10
MEGATRON_NEXT = "megatron-core==0.19.2"  # the extras install 0.16.1
# Extras of pyproject.toml, each of which is tested in its own environment.
TRACKERS = ("clearml", "mlflow", "swanlab", "trackio", "wandb")  # TensorBoard is always installed
TRACKER_TESTS = ("tests/registry/test_extension_points.py", "tests/tracking")
TASKS = {
    "reasoning": ("tests/workflows/preprocess/test_reasoning_tasks.py",),
    "textarena": ("tests/environments/test_environments.py", "-k", "textarena or word_list"),
}
BENCHMARK_TESTS = tuple(
    f"tests/workflows/evaluate/test_{name}.py"
    for name in ("published_benchmarks", "harness_client")
)
CLIENT_PACKAGES = ("tenacity",)  # of lm_eval[api], which evaluates a served model
PLAYWRIGHT = "playwright==1.65.2"
AXE_URL = "https://registry.npmjs.org/axe-core/-/axe-core-4.10.3.tgz"
AXE_SHA256 = "0f2b4d7dcdf7d1219df8d1959ad68e565f51d14c3f0d88bb71cd59abeb956292"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Their wheels are built for another torch than the CPU build, which makes `import vllm` fail.
# Engines import classes of vision-language models without them (rollout/images).
INCOMPATIBLE_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# Two threads that spin on two busy cores take ten times as long as one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}
# Even where the environment disables bytecode files, since hundreds of processes import the same.
BYTECODE_FILES = {"PYTHONDONTWRITEBYTECODE": ""}

# Tests that call functions of TRL.
ORACLE_TESTS = (
    "tests/algorithms/test_preference_losses.py",
    "tests/algorithms/test_distillation_losses.py",
    "tests/algorithms/test_algorithms_peers.py",
    "tests/algorithms/test_turns_peers.py",
    "tests/algorithms/test_averaging_groups.py",
)

# Tests of training, conversion and resumed trainings.
MEGATRON_TESTS = ("tests/trainer", "tests/models", "tests/checkpoint", "tests/verification")
TWO_MEGATRONS = "tests/trainer/checkpointing/test_two_megatrons.py"

# Memory of the largest test files, each with ranks, an engine, verifiers and a Ray cluster. Three
# workers took 6.5 GB together.
BYTES_PER_WORKER = 4 << 30
MAX_WORKERS = 8

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "layers", "tests"]


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small random model on arithmetic with SFT and GRPO, using the real commands."""
    install(session, "cpu,dev")
    run_example(session, "examples/quickstart/run.py", *session.posargs)


@nox.session
def laptop(session: nox.Session) -> None:
    """Make a real model of 135M parameters better with SFT and GRPO: `-- [--seed N]`."""
    install(session, "cpu,dev")
    session.run(sys.executable, "examples/laptop/run.py", *session.posargs, env=BYTECODE_FILES)


@nox.session
def vision(session: nox.Session) -> None:
    """Train a small random vision-language model to count shapes: `-- [--seed N]`."""
    install(session, "cpu,dev")
    run_example(session, "examples/vision/run.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests except those marked `full`."""
    run_tests(session, "-m", "not full", "--session-timeout=3600")


@nox.session
def fast(session: nox.Session) -> None:
    """Run the tests that start no ranks, engines or clusters; a few minutes on two cores."""
    run_tests(session, "-m", "not slow and not full", workers_per_core=1)


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests, including the full tables."""
    run_tests(session)


@nox.session
def oracles(session: nox.Session) -> None:
    """Compare losses and advantages with TRL's, which is installed, and with other checkouts."""
    install(session, "cpu,dev")
    peers = peers_folder()
    install_peers(session, peers)
    packages = next(peers.glob("lib/python*/site-packages"))
    paths = os.pathsep.join(filter(None, (str(packages), os.environ.get("MSRL_PEERS_PATH"))))
    command = ("-m", "pytest", "-n", "0", "-rs", *ORACLE_TESTS, *session.posargs)
    env = OFFLINE | ONE_THREAD | {"MSRL_PEERS_PATH": paths}
    session.run(sys.executable, *command, env=env)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Feed damaged and hostile files to every parser for at most 10 minutes: `-- [TARGET...]`."""
    install(session, "cpu,dev")
    python(session, "tests/fuzz.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Kill processes of every command at random: `-- [--minutes N] [--seed S] [KIND...]`."""
    install(session, "cpu,dev")
    python(session, "tests/soak.py", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """Run tests/npu on simulated Ascend NPUs with the real torch_npu: `-- [PYTEST-OPTION...]`."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        session.skip("the simulated NPU needs Linux and g++ (apt install g++)")
    install(session, "cpu,dev")
    packages = ROOT / ".nox" / "npu"
    install_torch_npu(session, packages)
    needs = packages / "needs-of-mindspeed"
    if os.environ.get("MINDSPEED_HOME") and not (needs / "scipy").exists():
        pip(session, "install", "-q", "--no-deps", "--target", str(needs), "scipy")
    simulator = ("tests/npu/simulator.py", "--packages", str(packages))
    python(session, *simulator, "-m", "pytest", "-n", "0", "tests/npu", *session.posargs)


@nox.session(name="megatron-next")
def megatron_next(session: nox.Session) -> None:
    """Run the tests of training and conversion with megatron-core 0.19: `-- [TEST...]`.

    Then compare both versions, each of which resumes trainings of the other.
    """
    install(session, "cpu,dev")
    newer = str(install_megatron_next(session))
    command = ("-m", "pytest", "-rs", "-m", "not full", *parallel_options())
    env = OFFLINE | ONE_THREAD | BYTECODE_FILES
    path = os.pathsep.join(filter(None, (newer, os.environ.get("PYTHONPATH"))))
    tests = session.posargs or MEGATRON_TESTS
    session.run(sys.executable, *command, *tests, env=env | {"PYTHONPATH": path})
    both = env | {"MSRL_OTHER_MEGATRON": newer}
    session.run(sys.executable, "-m", "pytest", "-rs", TWO_MEGATRONS, env=both)


@nox.session
def browser(session: nox.Session) -> None:
    """Test the pages of `msrl view` in an installed Chromium: `-- [PYTEST-OPTION...]`."""
    install(session, "cpu,dev")
    packages = ROOT / ".nox" / "browser"
    install_playwright(session, packages)
    paths = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    axe = axe_script(session, packages)
    env = OFFLINE | ONE_THREAD | {"PYTHONPATH": paths} | ({"MSRL_AXE": axe} if axe else {})
    command = ("-m", "pytest", "-n", "0", "-rs", "tests/browser", *session.posargs)
    session.run(sys.executable, *command, env=env)


@nox.session
def trackers(session: nox.Session) -> None:
    """Test each tracker that is an extra in its own environment: `-- [PYTEST-OPTION...]`."""
    for name in TRACKERS:
        test_extra(session, name, *TRACKER_TESTS, "-k", f"(reader or every_attempt) and {name}")


@nox.session
def tasks(session: nox.Session) -> None:
    """Test the tasks and games of other packages, each in its own environment."""
    for name, tests in TASKS.items():
        test_extra(session, name, *tests)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Test the suites of `msrl eval` in their own environment: `-- [PYTEST-OPTION...]`."""
    install(session, "cpu,dev")
    folder = ROOT / ".nox" / "benchmarks"
    install_extra(session, "benchmarks", folder, *CLIENT_PACKAGES)
    python = str(folder / "bin" / "python")
    command = ("-m", "pytest", "-n", "0", "-rs", *BENCHMARK_TESTS, *session.posargs)
    session.run(python, *command, env=OFFLINE | ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules and formatting with ruff."""
    install(session, "lint")
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with pyright, strict on the light packages."""
    install(session, "cpu,dev")
    python(session, "-m", "pyright", "--pythonpath", sys.executable, *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check layers, import cycles and heavy dependencies with import-linter."""
    install(session, "lint")
    command = "import importlinter.cli as cli, sys; sys.exit(cli.lint_imports_command())"
    python(session, "-c", command)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/docs. Warnings, such as broken links, are errors."""
    install(session, "docs")
    options = ("--fail-on-warning", "--keep-going", "--nitpicky", "-q")
    python(session, "-m", "sphinx", *options, "-c", "docs", ".", "build/docs", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmark msrl and its peers: `nox -s bench -- [NAME...] [--rounds N] [--write]`.

    `nox -s bench -- device` benchmarks this machine's accelerator.
    """
    if session.posargs[:1] == ["device"]:  # installing would replace the device's torch
        session.run(sys.executable, "-m", "benchmarks", *session.posargs, env=OFFLINE)
        return
    install(session, "cpu,dev")
    peers = peers_folder()
    if session.posargs[:1] != ["weights"] and PEERS_DIR.exists():  # it has no peer to install
        install_peers(session, peers)
    session.run(
        sys.executable, "-m", "benchmarks", "--peers", str(peers), *session.posargs, env=OFFLINE
    )


@nox.session
def learning(session: nox.Session) -> None:
    """Check that presets learn the quickstart's task: `-- [PRESET...] [--seeds N...]`.

    An interrupted session resumes.
    """
    install(session, "cpu,dev")
    run_example(session, "-m", "benchmarks.learning", *session.posargs)


@nox.session
def agent(session: nox.Session) -> None:
    """Check that an agent learns in several turns: `-- [--seeds N...] [--task NAME...]`."""
    install(session, "cpu,dev")
    run_example(session, "examples/agent/run.py", *session.posargs)


@nox.session
def chain(session: nox.Session) -> None:
    """Run SFT, a reward model, GRPO against it and a distillation: `-- [--seeds N]`."""
    install(session, "cpu,dev")
    run_example(session, "examples/chain/run.py", *session.posargs)


def run_tests(session: nox.Session, *options: str, workers_per_core: int = 2) -> None:
    """Run pytest in parallel with these options and those after `--`."""
    install(session, "cpu,dev")
    parallel = parallel_options(workers_per_core)
    python(session, "-m", "pytest", *options, *parallel, *session.posargs)


def test_extra(session: nox.Session, extra: str, *tests: str) -> None:
    """Run tests and the options after `--` in an environment that has an extra."""
    install(session, "cpu,dev")
    folder = ROOT / ".nox" / "extras" / extra
    install_extra(session, extra, folder)
    command = ("-m", "pytest", "-n", "0", "-rs", *tests, *session.posargs)
    session.run(str(folder / "bin" / "python"), *command, env=OFFLINE | ONE_THREAD)


def run_example(session: nox.Session, *args: str) -> None:
    """Run this environment's Python, offline and with the number of threads that users have."""
    session.run(sys.executable, *args, env=OFFLINE | BYTECODE_FILES)


def python(session: nox.Session, *args: str) -> None:
    """Run this environment's Python, offline and with one OpenMP thread per process."""
    session.run(sys.executable, *args, env=OFFLINE | ONE_THREAD | BYTECODE_FILES)


def parallel_options(workers_per_core: int = 2) -> tuple[str, ...]:
    """Return pytest-xdist's options for as many workers as cores and memory allow.

    With slow tests, one worker per core keeps it busy for 70% of the time, because they also wait
    for processes and time limits. Quick tests wait less than two more workers need to collect them.
    One worker runs all tests of a file, so that the file's ranks start once.
    """
    if sys.platform != "linux":
        return ()
    cores = len(os.sched_getaffinity(0))
    wanted = workers_per_core * cores
    workers = min(MAX_WORKERS, wanted, available_bytes() // BYTES_PER_WORKER)
    if workers <= 1:
        return ()
    return ("-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder")


def available_bytes() -> int:
    """Return the bytes available without swapping, at most the container's cgroup v2 limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    limit_text = limit.read_text().strip() if limit.exists() else "max"
    return min(available, int(limit_text)) if limit_text.isdecimal() else available


def install(session: nox.Session, extras: str) -> None:
    """Install msrl (editable) with these extras unless the stamp file records the same state."""
    if sys.prefix == sys.base_prefix:
        session.error(
            "nox runs in the system's Python. Run the README's command, which creates .venv first."
        )
    cpu = "cpu" in extras.split(",")
    if cpu and not (3, 11) <= sys.version_info[:2] <= (3, 13):
        version = sys.version.split()[0]
        session.error(
            f"Python {version}: the CPU build of vLLM needs Python 3.11 to 3.13. "
            "Create .venv with one of these."
        )
    if any(is_stamped(name) for name in {extras, "cpu,dev"}):
        return
    update_pip(session)
    pip(session, "install", "-q", "-e", f".[{extras}]", *(torch_index(session) if cpu else ()))
    if cpu:
        pip(session, "uninstall", "-q", "-y", *INCOMPATIBLE_PACKAGES)
    stamp(extras).write_text(fingerprint(extras))


def peers_folder() -> Path:
    """Return the folder of the peers' environment."""
    return Path(os.environ.get("MSRL_PEERS", ROOT / ".nox" / "peers"))


def install_peers(session: nox.Session, folder: Path) -> None:
    """Install the peers into `folder`; they need another transformers version than msrl."""
    requirements = (ROOT / "benchmarks" / "peers.txt").read_text()
    stamp_file = folder / "msrl-peers.stamp"
    if stamp_file.exists() and stamp_file.read_text() == requirements:
        return
    session.run_install(sys.executable, "-m", "venv", str(folder))
    install_command = ("-m", "pip", "install", "-q", "-r", "benchmarks/peers.txt")
    session.run_install(str(folder / "bin" / "python"), *install_command, *torch_index(session))
    stamp_file.write_text(requirements)


def install_torch_npu(session: nox.Session, folder: Path) -> None:
    """Install torch_npu into a separate folder, because torch loads it wherever it is installed.

    Skips the session if there is no wheel for this Python and machine.
    """
    stamp_file = folder / "msrl-npu.stamp"
    if stamp_file.exists() and stamp_file.read_text() == TORCH_NPU + sys.version:
        return
    options = ("-q", "--no-deps", "--upgrade", "--only-binary", ":all:", "--target", str(folder))
    try:
        pip(session, "install", *options, TORCH_NPU)
    except nox.command.CommandFailed:
        version = sys.version.split()[0]
        session.skip(f"pip cannot install {TORCH_NPU} for Python {version} on this machine")
    stamp_file.write_text(TORCH_NPU + sys.version)


def install_megatron_next(session: nox.Session) -> Path:
    """Unpack a newer megatron-core into a folder and return the folder.

    Its package requires Python 3.12. Only the helpers of its datasets are compiled for that
    version, and msrl does not use them, so the tests also run on Python 3.11.
    """
    folder = ROOT / ".nox" / "megatron-next"
    stamp_file = folder / "msrl.stamp"
    if stamp_file.exists() and stamp_file.read_text() == MEGATRON_NEXT:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    wheel = ("--no-deps", "--ignore-requires-python", "--only-binary=:all:")
    target = ("--python-version", "3.12", "--target", str(folder))
    pip(session, "install", "-q", *wheel, *target, MEGATRON_NEXT)
    stamp_file.write_text(MEGATRON_NEXT)
    return folder


def install_playwright(session: nox.Session, folder: Path) -> None:
    """Install Playwright, which uses the browser of the system, into `folder`."""
    stamp_file = folder / "msrl-browser.stamp"
    if stamp_file.exists() and stamp_file.read_text() == PLAYWRIGHT + sys.version:
        return
    pip(session, "install", "-q", "--upgrade", "--target", str(folder), PLAYWRIGHT)
    stamp_file.write_text(PLAYWRIGHT + sys.version)


def install_extra(session: nox.Session, extra: str, folder: Path, *more: str) -> None:
    """Create an environment in `folder` that extends this one by the packages of an extra."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    packages = [*project["optional-dependencies"][extra], *more]
    stamp_file, state = folder / f"msrl-{extra}.stamp", f"{packages} {sys.version}"
    if stamp_file.exists() and stamp_file.read_text() == state:
        return
    session.run_install(sys.executable, "-m", "venv", "--clear", str(folder))
    own = sysconfig.get_paths()["purelib"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    extended = folder / "lib" / version / "site-packages" / "msrl-environment.pth"
    extended.write_text(f"import site; site.addsitedir({own!r})\n")
    session.run_install(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages)
    stamp_file.write_text(state)


def axe_script(session: nox.Session, folder: Path) -> str | None:
    """Return the script of axe-core, downloaded once; None if the registry cannot be reached."""
    script = folder / "axe.min.js"
    if not script.exists():
        try:
            with urllib.request.urlopen(AXE_URL, timeout=30) as reply:
                archive = reply.read()
        except OSError as error:
            session.warn(f"axe-core cannot be downloaded ({error}): its tests are skipped")
            return None
        if hashlib.sha256(archive).hexdigest() != AXE_SHA256:
            session.error(f"{AXE_URL}: the file has another SHA-256 than AXE_SHA256 in noxfile.py")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            member = files.extractfile("package/axe.min.js")
            assert member is not None
            script.write_bytes(member.read())
    return str(script)


def pip(session: nox.Session, *args: str) -> None:
    """Run this environment's pip, also under `--install-only`."""
    session.run_install(
        sys.executable, "-m", "pip", *args, env={"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )


def update_pip(session: nox.Session) -> None:
    """Upgrade pip if it has no `--report` (before 22.2), as in some systems' environments."""
    command = [sys.executable, "-m", "pip", "--version"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    major, minor = output.split()[1].split(".")[:2]
    if (int(major), int(minor)) < (22, 2):
        pip(session, "install", "-q", "--upgrade", "pip>=23")


def torch_index(session: nox.Session) -> tuple[str, ...]:
    """Return pip's options for a CPU build of torch; none if its index offers one already."""
    if sys.platform != "linux" or offered_torch().endswith("+cpu"):
        return ()
    session.log(f"pip's index offers only torch builds for accelerators: adding {CPU_INDEX}")
    return ("--extra-index-url", CPU_INDEX)


def offered_torch() -> str:
    """Return the torch version that pip would install, from metadata alone; "" if there is none."""
    options = ("--dry-run", "--no-deps", "--ignore-installed", "-q", "--report", "-")
    command = [sys.executable, "-m", "pip", "install", *options, TORCH]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return ""
    text = result.stdout[result.stdout.index("{") :]
    return str(json.loads(text)["install"][0]["metadata"]["version"])


def stamp(extras: str) -> Path:
    return Path(sys.prefix) / f"msrl-{extras.replace(',', '-')}.stamp"


def is_stamped(extras: str) -> bool:
    return stamp(extras).exists() and stamp(extras).read_text() == fingerprint(extras)


def fingerprint(extras: str) -> str:
    """Return a hash of the project folder, the interpreter and pyproject.toml's project tables."""
    pyproject = nox.project.load_toml(ROOT / "pyproject.toml")
    facts = [str(ROOT), sys.version, extras, TORCH, pyproject["project"], pyproject["build-system"]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
