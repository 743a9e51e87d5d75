"""Results of benchmarks as numbers in `results.json`, and the table that README.md shows of them.

`nox -s bench -- NAME --write` replaces the results of the benchmarks that ran, keeps the others,
and writes the table again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from benchmarks.cases import Case, Sample

RESULTS = Path(__file__).with_name("results.json")
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table of results.json -->\n", "<!-- end of the table -->\n"
LABELS = {
    "copy_floor": "copy of the same bytes",
    "cp": "`cp`",
    "tokenize_ceiling": "tokenizer alone",
    "decode_resize": "decoding and resizing alone",
    "raw_hf": "plain transformers loop",
    "trl": "TRL",
    "trl_sft": "TRL",
    "trl_grpo": "TRL",
    "eager": "without compilation",
    "trl_dpo": "TRL",
    "trl_reward": "TRL",
    "tp2": "TP 2",
    "pp2": "PP 2",
    "cp2": "CP 2",
    "dp2": "DP 2",
    "sequential": "one expert after another",
    "memcpy": "plain copy",
    "vllm": "the same vLLM offline",
    "step": "the step",
}
HEAD = ("| work | msrl | peer | ratio | goal | reached |", "|---|---|---|---|---|---|")
Samples: TypeAlias = "Mapping[str, Sequence[Sample]]"
Result = Mapping[str, Any]


def result(case: Case, samples: Samples) -> dict[str, Any]:
    """Return the medians of a benchmark and its goals as JSON values."""
    ours = median(samples["ours"])
    peers = {name: median(samples[name]) for name in case.peers}
    return {
        "work": case.work,
        "unit": case.unit,
        "higher_is_better": case.higher_is_better,
        "rounds": len(samples["ours"]),
        "ours": ours,
        "peers": {
            name: {"value": value, "ratio": ours / value, "goal": case.goals.get(name)}
            for name, value in peers.items()
        },
        "besides": {name: additional_medians(runs) for name, runs in samples.items()},
    }


def write(results: Mapping[str, Result], stack: Mapping[str, str], path: Path = RESULTS) -> None:
    """Replace the results of some benchmarks by name. `stack` has versions, machine and date."""
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged = saved | {name: {**entry, "stack": dict(stack)} for name, entry in results.items()}
    path.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def update_readme(path: Path = RESULTS, readme: Path = README) -> None:
    """Write the table of all saved results into a page, between its markers."""
    replace_between(readme, BEGIN, END, saved_table(path))


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text of a page between two markers, each of which is a line."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def table(results: Mapping[str, Result]) -> list[str]:
    """Return the lines of the Markdown table of results by name."""
    return [*HEAD, *(row for entry in results.values() for row in rows(entry))]


def saved_table(path: Path = RESULTS) -> str:
    """Return the table of all saved results, followed by the date of each."""
    results: dict[str, Result] = json.loads(path.read_text(encoding="utf-8"))
    notes = {_origin(entry) for entry in results.values()}
    return "\n".join([*table(results), "", f"Measured: {'; '.join(sorted(notes))}.", ""])


def _origin(entry: Result) -> str:
    stack = entry["stack"]
    return f"{stack['date']}, {stack['machine']}, medians of {entry['rounds']} rounds"


def rows(entry: Result) -> Iterator[str]:
    """Yield a table row per peer. The ratio is msrl / peer: lower is better except for rates."""
    for name, peer in entry["peers"].items():
        values = f"{_value(entry['ours'], entry)} | {LABELS[name]} {_value(peer['value'], entry)}"
        ratio = f"{peer['ratio']:.2f}"
        yield f"| {entry['work']} | {values} | {ratio} | {_goal_cells(entry, peer)} |"


def _value(value: float, entry: Result) -> str:
    return f"{figure(value)} {entry['unit']}"


def _goal_cells(entry: Result, peer: Mapping[str, Any]) -> str:
    """Return the table cells of a goal and of whether it is reached."""
    goal, ratio = peer["goal"], peer["ratio"]
    if goal is None:
        return " | "
    limit, is_reached = ("at most", ratio <= goal)
    if entry["higher_is_better"]:
        limit, is_reached = ("at least", ratio >= goal)
    return f"{limit} {goal:.3g} | {'yes' if is_reached else '**no**'}"


def additional_medians(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the medians of the additional figures by name."""
    medians: dict[str, float] = {}
    for key in samples[0].more:
        values = [sample.more[key] for sample in samples if key in sample.more]
        medians[key] = statistics.median(values)
    return medians


def median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.value for sample in samples)


def figure(value: float) -> str:
    """Format a value with three significant digits and without an exponent.

    >>> figure(0.50321), figure(1234.5), figure(11.26)
    ('0.503', '1,234', '11.3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
