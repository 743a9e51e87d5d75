"""Real answers of MATH-500, GSM8K and DAPO: each is its own and hardly ever another's; and many scorings with bad ones among them."""

import sys
from pathlib import Path

import pytest

from support import shared_data

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rewards import NUM_SCORINGS, agreement_row, data_sets, speed_row


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.full
def test_every_true_answer_is_right_for_its_own_problem_and_not_for_another():
    rows = [cells(agreement_row(*data, num_workers=2)) for data in data_sets(shared_data("math"))]
    assert [(row[0], row[2]) for row in rows] == [("MATH-500", "500")] * 2 + [("GSM8K", "8792")] + [("DAPO-17k", "17917")] * 2
    assert [row[3] for row in rows] == ["100.00%"] * 5
    assert all(float(row[4].rstrip("%")) < 1.0 for row in rows), rows


@pytest.mark.slow
def test_of_ten_thousand_scorings_with_hanging_and_crashing_ones_none_is_lost():
    row = cells(speed_row(num_workers=2, trouble=3))
    assert NUM_SCORINGS == 10_000
    assert row[2:] == ["0", "3", "3", "3"]
