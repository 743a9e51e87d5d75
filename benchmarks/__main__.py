"""Compare msrl with peers: `nox -s bench -- [NAME...] [--rounds N] [--write]`.

Both sides run alternately, and the medians and their ratios are printed as a table. The ratio is
the result, since absolute figures depend on the load of the machine. The scripts of the peers and
of their inputs are in `../shared/bench` (or `--scripts`); the nox session creates their
environment. The benchmark `device` needs none of this (see `device.py`), and `imports FOLDER`
counts the outcomes of importing foreign files (see `imports.py`). `simulate` compares schedules of
generation and training (see `simulation.py`), and `async` measures synchronous and asynchronous
trainings (see `asynchronous.py`). `episodes` compares episodes with slow tools with plain
generation (see `episodes.py`). `resharding` adds up the bytes that two plans of a weight transfer
send (see `resharding.py`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks.cases import CASES, ROOT, Bench, Case, Measurement, Sample
from benchmarks.measure import BenchError, quiet_environment, timed

RESULTS = ROOT / "benchmarks" / "results.md"
HEAD = ("| work | ours | peer | ratio | goal | reached |", "|---|---|---|---|---|---|")
# Modules of the benchmarks without peers, which have separate options.
SEPARATE = {
    "async": "asynchronous",
    "device": "device",
    "episodes": "episodes",
    "imports": "imports",
    "resharding": "resharding",
    "simulate": "simulation",
}
Samples = Mapping[str, Sequence[Sample]]


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
    rows: list[str] = []
    details: list[str] = []
    failed = False
    for case in cases:
        try:
            samples = measure(case, bench, args.rounds)
        except BenchError as error:
            failed = True
            print(f"{case.name}: {error}", file=sys.stderr)
            rows.append(f"| {case.work} | failed | | | | |")
            continue
        rows += table_rows(case, samples)
        details += detail_lines(case, samples)
    print("\n".join([*HEAD, *rows, "", *details]))
    if args.write:
        RESULTS.write_text("\n".join([*preamble(args.rounds), *HEAD, *rows, "", *details]) + "\n")
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
        "--write", action="store_true", help=f"Also write {RESULTS.relative_to(ROOT)}."
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


def table_rows(case: Case, samples: Samples) -> list[str]:
    return [
        table_row(case, peer, median(samples["ours"]), median(samples[peer])) for peer in case.peers
    ]


def table_row(case: Case, peer: str, ours: float, theirs: float) -> str:
    """Return a table row. The ratio is ours / peer: lower is better for seconds, not for rates."""
    ratio = ours / theirs
    figures = f"{figure(ours)} {case.unit} | {peer} {figure(theirs)} {case.unit} | {ratio:.2f}"
    return f"| {case.work} | {figures} | {goal_cells(case, peer, ratio)} |"


def goal_cells(case: Case, peer: str, ratio: float) -> str:
    """Return the table cells of a goal and of whether it is reached."""
    goal = case.goals.get(peer)
    if goal is None:
        return " | "
    if case.higher_is_better:
        return f"at least {goal:g} | {'yes' if ratio >= goal else '**no**'}"
    return f"at most {goal:g} | {'yes' if ratio <= goal else '**no**'}"


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


def additional_medians(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the medians of the additional figures by name."""
    medians: dict[str, float] = {}
    for key in samples[0].more:
        values = [sample.more[key] for sample in samples if key in sample.more]
        medians[key] = statistics.median(values)
    return medians


def preamble(rounds: int) -> list[str]:
    from msrl.tracking.run import stack_versions

    versions = ", ".join(f"{name} {version}" for name, version in stack_versions().items())
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return [
        f"# Benchmarks of {date.today().isoformat()}",
        "",
        f"Medians of {rounds} alternating rounds; {machine}; {versions}.",
        "",
    ]


def median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.value for sample in samples)


def figure(value: float) -> str:
    """Format a value with three significant digits and without an exponent.

    >>> figure(0.50321), figure(1234.5), figure(11.26)
    ('0.503', '1,234', '11.3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
