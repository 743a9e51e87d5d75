"""The benchmarks' own arithmetic, memory measurement and configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import detail_lines, figure, table_row  # noqa: E402
from benchmarks.cases import CASES, Sample  # noqa: E402
from benchmarks.measure import BenchError, quiet_environment, timed  # noqa: E402

BY_NAME = {case.name: case for case in CASES}


def test_a_ratio_of_seconds_is_reached_below_its_goal_and_one_of_rates_above() -> None:
    assert table_row(BY_NAME["convert"], "copy_floor", 5.0, 4.0).endswith("| 5 s | copy_floor 4 s | 1.25 | at most 1.25 | yes |")
    assert table_row(BY_NAME["convert"], "copy_floor", 5.1, 4.0).endswith("| 1.27 | at most 1.25 | **no** |")
    assert table_row(BY_NAME["preprocess"], "tokenize_ceiling", 300.0, 500.0).endswith("| 0.60 | at least 0.8 | **no** |")
    assert table_row(BY_NAME["sft-fp32"], "trl_sft", 0.5, 1.0).endswith("| 0.50 |  |  |")


def test_every_sample_is_told() -> None:
    samples = {"ours": [Sample(1.0, {"MB": 5.0}), Sample(3.0, {"MB": 7.0})], "copy_floor": [Sample(2.0), Sample(2.5)]}
    lines = detail_lines(BY_NAME["convert"], samples)
    assert lines == ["- convert, ours: 1, 3 s", "- convert, copy_floor: 2, 2.5 s", "- convert, ours besides: MB 6"]


@pytest.mark.parametrize(("value", "text"), [(0.50321, "0.503"), (1234.5, "1,234"), (11.26, "11.3"), (99.96, "100")])
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_peak_memory_counts_what_a_child_allocates_and_not_what_it_maps(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(300_000_000))
    child = "import numpy as np, time; m = np.memmap('big', mode='r'); m.sum(); a = np.ones(25_000_000); time.sleep(0.5)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = timed([sys.executable, "-c", code], environment=quiet_environment(), cwd=tmp_path)
    assert 200e6 < done.peak_anonymous_bytes < 300e6
    assert done.seconds > 0.5


def test_a_program_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"exit 3: (.|\n)*no such model"):
        timed([sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"], environment=quiet_environment(), cwd=tmp_path)


def test_an_unknown_benchmark_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "sftt"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark begins with 'sftt'; there are convert, convert-small, large-convert, preprocess" in done.stderr


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_the_configurations_are_valid(name: str) -> None:
    from msrl.config.loader import load

    load([str(ROOT / "benchmarks" / f"{name}.yaml")], [])
