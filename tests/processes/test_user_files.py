"""Python files of users: those that are executed, and those that are not."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from msrl import user_files
from msrl.processes.child import python_command


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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no option for this")
def test_files_of_the_working_folder_replace_no_module_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "inspect.py").write_text("raise SystemExit('the wrong module')")
    command = python_command("-c", "import inspect; print(inspect.__file__)")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == Path(inspect.__file__)
