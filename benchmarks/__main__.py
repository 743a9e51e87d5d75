"""Compare msrl with peers: `nox -s bench -- [NAME...] [--rounds N] [--write]`.

Both sides run alternately, and the medians and their ratios are printed as a table. The ratio is
the result, since absolute figures depend on the load of the machine. `--write` saves the medians in
results.json and the table in README.md. The scripts of the peers and of their inputs are in
`../shared/bench` (or `--scripts`); the nox session creates their environment. The benchmark
`device` needs none of this (see `device.py`), and `imports FOLDER` counts the outcomes of importing
foreign files (see `imports.py`). `simulate` compares schedules of generation and training (see
`simulation.py`), and `async` measures synchronous and asynchronous trainings (see
`asynchronous.py`). `episodes` compares episodes with slow tools with plain generation (see
`episodes.py`). `resharding` adds up the bytes that two plans of a weight transfer send (see
`resharding.py`). `samplers` compares samplers of prompts at equal tokens (see `samplers.py`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES as TINY_CASES
from benchmarks.cases import ROOT, Bench, Case, Measurement, Sample
from benchmarks.images import CASES as IMAGE_CASES
from benchmarks.laptop import CASES as LAPTOP_CASES
from benchmarks.measure import BenchError, quiet_environment, timed
from benchmarks.results import (
    RESULTS,
    Samples,
    additional_medians,
    figure,
    result,
    table,
    update_readme,
    write,
)

CASES = (*TINY_CASES, *IMAGE_CASES, *LAPTOP_CASES)
# Modules of the benchmarks without peers, which have separate options.
SEPARATE = {
    "async": "asynchronous",
    "device": "device",
    "episodes": "episodes",
    "imports": "imports",
    "resharding": "resharding",
    "samplers": "samplers",
    "simulate": "simulation",
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in SEPARATE:
        # Each has its own needs: the device benchmark lacks packages that others import.
        return importlib.import_module(f"benchmarks.{SEPARATE[name]}").main(sys.argv[2:])
    args = arguments()
    bench = Bench(args.scripts, args.peers / "bin" / "python", args.inputs)
    cases = select_cases(args.names)
    try:
        if any(case.uses_inputs for case in cases):
            make_inputs(bench)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    details: list[str] = []
    failed = False
    for case in cases:
        try:
            samples = measure(case, bench, args.rounds)
        except BenchError as error:
            failed = True
            print(f"{case.name}: failed: {error}", file=sys.stderr)
            continue
        results[case.name] = result(case, samples)
        if args.write:  # after each benchmark, so that an interruption loses none
            write(results, stack())
            update_readme()
        details += detail_lines(case, samples)
    print("\n".join([*table(results), "", *details]))
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    known = [case.name for case in CASES]
    parser.add_argument(
        "names",
        nargs="*",
        help=f"Names of benchmarks or their beginnings (default: all): {', '.join(known)}. "
        "`device` has separate options.",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="Number of runs of each side (default: 3)."
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"Also save the medians in {RESULTS.name} and README.md.",
    )
    parser.add_argument(
        "--scripts",
        type=Path,
        default=ROOT / "../shared/bench",
        help="Folder of the peers' scripts.",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".nox" / "peers",
        help="Virtual environment of the peers.",
    )
    inputs = Path(os.environ.get("MSRL_BENCH_INPUTS", ROOT / ".nox" / "bench_inputs"))
    parser.add_argument(
        "--inputs", type=Path, default=inputs, help="Folder of the inputs, created if missing."
    )
    args = parser.parse_args()
    args.scripts, args.inputs = args.scripts.resolve(), args.inputs.resolve()
    for name in args.names:
        if not any(benchmark.startswith(name) for benchmark in known):
            parser.error(f"no benchmark begins with {name!r}; there are {', '.join(known)}")
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return args


def select_cases(names: Sequence[str]) -> list[Case]:
    """Return the benchmarks whose names begin with one of `names`; without names, all."""
    return [case for case in CASES if not names or case.name.startswith(tuple(names))]


def make_inputs(bench: Bench) -> None:
    """Create the shared inputs with the peers' script if they are missing."""
    if not (bench.scripts / "make_inputs.py").exists():
        raise BenchError(
            f"{bench.scripts}: no script make_inputs.py. Set --scripts to the peers' scripts."
        )
    if not (bench.inputs / "qwen3_06b" / "model.safetensors").exists():
        log("creating the inputs")
        command = [bench.peers_python, bench.scripts / "make_inputs.py", bench.inputs]
        timed(command, environment=quiet_environment(), cwd=ROOT)
    bench.work.mkdir(exist_ok=True)


def measure(case: Case, bench: Bench, rounds: int) -> dict[str, list[Sample]]:
    """Return the samples of msrl and of each peer, one of each per round."""
    log(f"{case.name}: preparing")
    case.prepare(bench)
    sides: dict[str, Measurement] = {"ours": case.ours, **case.peers}
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for number in range(1, rounds + 1):
        for name, run in sides.items():
            sample = run(bench)
            samples[name].append(sample)
            result = f"{name} {figure(sample.value)} {case.unit}"
            log(f"{case.name}: round {number} of {rounds}: {result}")
    return samples


def detail_lines(case: Case, samples: Samples) -> list[str]:
    """Return lines with all samples, and with the medians of their additional figures."""
    lines = []
    for name, runs in samples.items():
        values = ", ".join(figure(sample.value) for sample in runs)
        lines.append(f"- {case.name}, {name}: {values} {case.unit}")
    for name, runs in samples.items():
        medians = additional_medians(runs)
        if medians:
            values = ", ".join(f"{key} {figure(value)}" for key, value in medians.items())
            lines.append(f"- {case.name}, {name} besides: {values}")
    return lines


def stack() -> dict[str, str]:
    """Return the date, the machine and the versions of the packages."""
    from msrl.tracking.run import stack_versions

    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return {"date": date.today().isoformat(), "machine": machine, **stack_versions()}


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
