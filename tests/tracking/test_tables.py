"""Tables of printed reports at the width of a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import evidence as recorded
import msrl
from msrl.diagnose.verdict import judge
from msrl.tracking.tables import WIDTH, table_lines
from msrl.workflows.diagnose.report import as_text
from msrl.workflows.evaluate.results import Result, result_table

# As long as the longest cells of a verification: sizes, and a result with outliers.
COMPARED, OUTLIERS = "compared " * 10 + "151,936", "1.1e-05 (limit 1e-04), " * 6 + "25%"
RANK_FILE = "iter_0000001/mp_rank_00_000_000/model_optim_rng.pt"
TABLES = {
    "verification": [
        ("check", "result", "compared"),
        ("round trip", "equal", "18,867 tensors, 1.3 TB"),
        ("logits, fp32", OUTLIERS, COMPARED),
    ],
    "plan": [
        ("file", "tensors", "parameters", "size"),
        (RANK_FILE, "1,024", "671,026,419,200", "1.3 TB"),
    ],
    "inspection": [
        ("file", "tensors", "parameters", "types", "size"),
        (RANK_FILE, "1024", "671,026,419,200", "bfloat16, float32", "1.3 TB"),
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_80_columns_and_keeps_every_word(name: str) -> None:
    rows = TABLES[name]
    lines = table_lines(rows)
    assert max(map(len, lines)) <= WIDTH == 80
    text = " ".join(" ".join(lines).split())
    assert all(cell in text for row in rows for cell in row if cell not in rows[0][:1])


def test_a_narrow_table_has_aligned_columns() -> None:
    assert table_lines([("file", "size"), ("a", "1 B"), ("long name", "22 B")]) == [
        "file       size",
        "a          1 B",
        "long name  22 B",
    ]


def test_results_of_evaluations_fit_80_columns() -> None:
    accuracies = ("pass@1", "pass@2", "pass@4", "pass@8", "mean@8")
    means = ("success", "turns", "tool_errors", "faults", "reward", "response_length", "truncated")
    metrics = dict.fromkeys((*accuracies, *means), 0.6071)
    result = Result(
        label="grpo-2026-11-28-qwen2.5-0.5b-gsm8k step 1200",
        series="grpo",
        step=1200,
        path="runs/grpo/checkpoints",
        digest="0",
        num_prompts=1319,
        num_samples=8,
        seconds=60.0,
        metrics=metrics,
        intervals=dict.fromkeys(accuracies, (0.5791, 0.6344)),
        samples="samples.jsonl",
        notes=(),
    )
    lines = result_table([result])
    assert max(map(len, lines)) <= WIDTH
    assert "pass@8: 60.7% [57.9%, 63.4%]" in "\n".join(lines)


def test_the_table_of_a_diagnosis_fits_80_columns() -> None:
    evidence = recorded.healthy()
    table, _, _ = as_text(judge(evidence), evidence).partition("\n\n")
    lines = table.splitlines()
    assert lines[0].startswith("log-probabilities") and max(map(len, lines)) <= WIDTH


def test_all_tables_of_rows_are_made_by_one_function() -> None:
    """Others would not fit 80 columns. The memory estimate has a name and a number in a line."""
    package = Path(msrl.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\.ljust\(|rich\.table|rich import .*table", path.read_text())
    }
    assert found == {"tracking/tables.py"}
