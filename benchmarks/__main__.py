"""`nox -s bench -- [NAME...] [--rounds N] [--write]`: ours and the peers' in turn, medians and their ratios as a table.

The peers' scripts and their inputs' maker stand in `../shared/bench` (or `--scripts`); their environment is made by the nox session.
Figures are of this machine as busy as it is: the ratio is what counts, since both sides run in turn.
`device` stands apart: it needs none of that (see `device.py`). `imports FOLDER` counts the outcomes of importing foreign files (see `imports.py`).
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

from benchmarks import device, imports
from benchmarks.cases import CASES, ROOT, Bench, Case, Sample, Way
from benchmarks.measure import BenchError, quiet_environment, timed

RESULTS = ROOT / "benchmarks" / "results.md"
HEAD = ("| work | ours | peer | ratio | asked for | reached |", "|---|---|---|---|---|---|")
Samples = Mapping[str, Sequence[Sample]]


def main() -> int:
    if sys.argv[1:2] == ["device"]:
        return device.main(sys.argv[2:])
    if sys.argv[1:2] == ["imports"]:
        return imports.main(sys.argv[2:])
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
    for case in chosen(args.names):
        try:
            samples = measured(case, bench, args.rounds)
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
    which = f"benchmarks, by name or its beginning (default: all): {', '.join(known)}; or `device`, which has options of its own"
    parser.add_argument("names", nargs="*", help=which)
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each side runs, in turn (default: 3)"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"also write {RESULTS.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--scripts",
        type=Path,
        default=ROOT / "../shared/bench",
        help="folder of the peers' scripts",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".nox" / "peers",
        help="virtual environment of the peers",
    )
    inputs = Path(os.environ.get("MSRL_BENCH_INPUTS", ROOT / ".nox" / "bench_inputs"))
    parser.add_argument(
        "--inputs", type=Path, default=inputs, help="folder of the inputs; made where it is absent"
    )
    args = parser.parse_args()
    args.scripts, args.inputs = args.scripts.resolve(), args.inputs.resolve()
    for name in args.names:
        if not any(one.startswith(name) for one in known):
            parser.error(f"no benchmark begins with {name!r}; there are {', '.join(known)}")
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return args


def chosen(names: Sequence[str]) -> list[Case]:
    return [
        case for case in CASES if not names or any(case.name.startswith(name) for name in names)
    ]


def make_inputs(bench: Bench) -> None:
    """Makes the shared inputs with the peers' own script, unless they are there."""
    if not (bench.scripts / "make_inputs.py").exists():
        raise BenchError(
            f"{bench.scripts}: the peers' scripts are not here; name their folder with --scripts"
        )
    if not (bench.inputs / "qwen3_06b" / "model.safetensors").exists():
        say("making the inputs")
        maker = [bench.peers_python, bench.scripts / "make_inputs.py", bench.inputs]
        timed(maker, environment=quiet_environment(), cwd=ROOT)
    bench.work.mkdir(exist_ok=True)


def measured(case: Case, bench: Bench, rounds: int) -> dict[str, list[Sample]]:
    """The samples of ours and of each peer, one of each per round."""
    say(f"{case.name}: preparing")
    case.prepare(bench)
    ways: dict[str, Way] = {"ours": case.ours, **case.peers}
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            sample = way(bench)
            samples[name].append(sample)
            say(
                f"{case.name}: round {number} of {rounds}: {name} {figure(sample.value)} {case.unit}"
            )
    return samples


def table_rows(case: Case, samples: Samples) -> list[str]:
    return [
        table_row(case, peer, median(samples["ours"]), median(samples[peer])) for peer in case.peers
    ]


def table_row(case: Case, peer: str, ours: float, theirs: float) -> str:
    """A row of the table: `ratio` is ours / peer, so that less is better for seconds, more for rates."""
    ratio = ours / theirs
    goal = case.goals.get(peer)
    asked = "" if goal is None else f"{'at least' if case.higher_is_better else 'at most'} {goal:g}"
    reached = (
        ""
        if goal is None
        else ("yes" if (ratio >= goal if case.higher_is_better else ratio <= goal) else "**no**")
    )
    figures = f"{figure(ours)} {case.unit} | {peer} {figure(theirs)} {case.unit} | {ratio:.2f}"
    return f"| {case.work} | {figures} | {asked} | {reached} |"


def detail_lines(case: Case, samples: Samples) -> list[str]:
    """Every sample, and the medians of the further figures of ours."""
    lines = [
        f"- {case.name}, {name}: {', '.join(figure(s.value) for s in taken)} {case.unit}"
        for name, taken in samples.items()
    ]
    for name, taken in samples.items():
        more = {
            key: statistics.median(s.more[key] for s in taken if key in s.more)
            for key in taken[0].more
        }
        if more:
            lines.append(
                f"- {case.name}, {name} besides: {', '.join(f'{key} {figure(value)}' for key, value in more.items())}"
            )
    return lines


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
    """Three significant digits, without an exponent.

    >>> figure(0.50321), figure(1234.5), figure(11.26)
    ('0.503', '1,234', '11.3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
