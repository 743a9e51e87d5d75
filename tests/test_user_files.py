"""Execution of Python files of users."""

from __future__ import annotations

import sys

import pytest

from msrl import user_files


def test_a_file_is_executed_without_writing_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "reward.py"
    for value in (1, 2):  # the second file has the size and possibly the time of the first
        file.write_text(f"VALUE = {value}\n")
        assert value == user_files.execute(str(file), "msrl_test_reward").VALUE
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_of_the_file_names_its_line(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("VALUE = 1\nVALUE / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        user_files.execute(str(file), "msrl_test_reward")
    last = raised.traceback[-1]
    assert (last.path, last.lineno + 1) == (file, 2)
