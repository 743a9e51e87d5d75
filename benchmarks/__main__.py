"""Benchmarks of msrl and its peers: `nox -s bench -- [NAME...] [--rounds N] [--write]`.

msrl and the peers run in alternation; the result is a table of medians and ratios. The load of the
machine affects all figures, so compare the ratios. The peers' scripts and the script that creates
their inputs are in `../shared/bench` (or `--scripts`). The nox session creates the peers'
environment. The benchmark `device` needs none of them (see `device.py`).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks import device
from benchmarks.cases import CASES, ROOT, Bench, Case, Method, Sample
from benchmarks.measure import BenchError, quiet_environment, timed

RESULTS = ROOT / "benchmarks" / "results.md"
HEAD = ("| work | ours | peer | ratio | goal | reached |", "|---|---|---|---|---|---|")
Samples = Mapping[str, Sequence[Sample]]


def main() -> int:
    if sys.argv[1:2] == ["device"]:
        return device.main(sys.argv[2:])
    args = arguments()
    bench = Bench(args.scripts, args.peers / "bin" / "python", args.inputs)
    try:
        make_inputs(bench)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[str] = []
    details: list[str] = []
    failed = False
    for case in selected_cases(args.names):
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
    names = ", ".join(known)
    names_help = (
        f"Names or prefixes of benchmarks (default: all): {names}. `device` has its own options."
    )
    parser.add_argument("names", nargs="*", help=names_help)
    parser.add_argument(
        "--rounds", type=int, default=3, help="Number of alternating rounds (default: 3)."
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"Also write the results to {RESULTS.relative_to(ROOT)}.",
    )
    parser.add_argument(
        "--scripts",
        type=Path,
        default=ROOT / "../shared/bench",
        help="Folder of the peers' scripts (default: %(default)s).",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".nox" / "peers",
        help="Virtual environment of the peers (default: %(default)s).",
    )
    inputs = Path(os.environ.get("MSRL_BENCH_INPUTS", ROOT / ".nox" / "bench_inputs"))
    parser.add_argument(
        "--inputs",
        type=Path,
        default=inputs,
        help="Folder of the inputs, created if absent (default: %(default)s).",
    )
    args = parser.parse_args()
    args.scripts, args.inputs = args.scripts.resolve(), args.inputs.resolve()
    for name in args.names:
        if not any(benchmark.startswith(name) for benchmark in known):
            parser.error(f"{name!r}: no benchmark has this prefix. Choose from {names}.")
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return args


def selected_cases(names: Sequence[str]) -> list[Case]:
    if not names:
        return list(CASES)
    return [case for case in CASES if case.name.startswith(tuple(names))]


def make_inputs(bench: Bench) -> None:
    """Create the shared inputs with the peers' script, unless they exist."""
    if not (bench.scripts / "make_inputs.py").exists():
        raise BenchError(
            f"{bench.scripts}: no peers' scripts there. Specify their folder with --scripts."
        )
    if not (bench.inputs / "qwen3_06b" / "model.safetensors").exists():
        log("creating the inputs")
        command = [bench.peers_python, bench.scripts / "make_inputs.py", bench.inputs]
        timed(command, environment=quiet_environment(), cwd=ROOT)
    bench.work.mkdir(exist_ok=True)


def measure(case: Case, bench: Bench, rounds: int) -> dict[str, list[Sample]]:
    """Return the samples of msrl and of each peer, one per round."""
    log(f"{case.name}: preparing")
    case.prepare(bench)
    methods: dict[str, Method] = {"ours": case.ours, **case.peers}
    samples: dict[str, list[Sample]] = {name: [] for name in methods}
    for number in range(1, rounds + 1):
        for name, method in methods.items():
            sample = method(bench)
            samples[name].append(sample)
            result = f"{name} {figure(sample.value)} {case.unit}"
            log(f"{case.name}: round {number} of {rounds}: {result}")
    return samples


def table_rows(case: Case, samples: Samples) -> list[str]:
    return [
        table_row(case, peer, median(samples["ours"]), median(samples[peer])) for peer in case.peers
    ]


def table_row(case: Case, peer: str, ours: float, theirs: float) -> str:
    """Return a table row with the ratio ours / peer (lower is better for seconds)."""
    ratio = ours / theirs
    goal = case.goals.get(peer)
    figures = f"{figure(ours)} {case.unit} | {peer} {figure(theirs)} {case.unit} | {ratio:.2f}"
    if goal is None:
        return f"| {case.work} | {figures} |  |  |"
    bound = "at least" if case.higher_is_better else "at most"
    is_reached = ratio >= goal if case.higher_is_better else ratio <= goal
    return f"| {case.work} | {figures} | {bound} {goal:g} | {'yes' if is_reached else '**no**'} |"


def detail_lines(case: Case, samples: Samples) -> list[str]:
    """Return lines with every sample and with the medians of the additional figures."""
    lines: list[str] = []
    for name, values in samples.items():
        figures = ", ".join(figure(sample.value) for sample in values)
        lines.append(f"- {case.name}, {name}: {figures} {case.unit}")
    for name, values in samples.items():
        medians = [f"{key} {figure(median_of_extra(values, key))}" for key in values[0].extra]
        if medians:
            lines.append(f"- {case.name}, {name}, also: {', '.join(medians)}")
    return lines


def median_of_extra(samples: Sequence[Sample], key: str) -> float:
    """Return the median of an additional figure over the samples that have it."""
    return statistics.median(sample.extra[key] for sample in samples if key in sample.extra)


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
    """Format a number with three significant digits and without an exponent.

    >>> figure(0.50321), figure(1234.5), figure(11.26)
    ('0.503', '1,234', '11.3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
