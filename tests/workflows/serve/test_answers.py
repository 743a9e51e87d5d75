"""Output of `msrl generate`: completed rows are not lost, and no row is incomplete."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from msrl.errors import MsrlError
from msrl.types import Completion
from msrl.workflows.serve.answers import json_line, open_output, requires_ascii
from support import assert_mentions, mentions
from tiny_qwen2 import save_model

COMMAND = "import sys; from msrl.cli.app import main; main()"


def test_completed_rows_are_kept_under_another_name_after_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new" / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), open_output(out) as write:
        write('{"id": 1}\n{"id": 2}\n')
        raise KeyboardInterrupt
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl.partial"]
    assert (tmp_path / "new" / "out.jsonl.partial").read_text() == '{"id": 1}\n{"id": 2}\n'
    assert_mentions(capsys.readouterr().err, f"{out}.partial", "rows")


def test_an_interrupt_before_the_first_row_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), open_output(tmp_path / "out.jsonl"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_full_disk_gives_one_message_and_complete_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the limit would cut it
    out = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # bytes per file; pytest captures output in files, but capsys does not
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
    try:
        with (
            pytest.raises(
                MsrlError, match=mentions("generate.output=", "out.jsonl", "File too large")
            ),
            open_output(out) as write,
        ):
            write('{"id": 1}\n')
            write('{"id": 2}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out.jsonl.partial").read_text() == '{"id": 1}\n'
    assert_mentions(capsys.readouterr().err, "out.jsonl.partial", "rows")


def test_rows_are_written_to_a_pipe_immediately(monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with open_output(None) as write:
        write("a\n")
        assert pipe.getvalue() == "a\n"


def test_on_a_terminal_rows_are_printed_after_the_progress_bar_even_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(KeyboardInterrupt), open_output(None) as write:
        monkeypatch.setattr(sys, "stdout", io.StringIO())  # as the bar does
        write("a\n")
        assert terminal.getvalue() == ""
        raise KeyboardInterrupt
    assert terminal.getvalue() == "a\n"


def test_rows_are_escaped_for_an_encoding_without_all_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    completion = Completion(
        np.array([1]), np.array([0.0], np.float32), "stop", 0, "\N{GRINNING FACE}"
    )
    assert json.loads(json_line({"id": "ü"}, [completion], (), is_ascii=True)) == json.loads(
        json_line({"id": "ü"}, [completion], ())
    )
    assert json_line({"id": "ü"}, [completion], (), is_ascii=True).isascii()
    for encoding, expected in (("gbk", True), ("utf-8", False), ("UTF8", False)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert requires_ascii(None) == expected
        assert not requires_ascii(tmp_path)


@pytest.mark.full
@pytest.mark.slow
def test_completions_are_printed_in_a_locale_without_all_characters(tmp_path: Path):
    save_model(tmp_path / "model", tied=True)
    (tmp_path / "in.jsonl").write_text('{"prompt": "\N{GRINNING FACE}"}\n', encoding="utf-8")
    common = ["--model", "model", "--max-tokens", "30", "--temperature", "1"]
    for command, arguments in (
        ("generate", ["--input", "in.jsonl"]),
        ("generate", ["--prompt", "x"]),
        ("chat", []),
    ):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, command, *common, *arguments],
            input=b"hello\n",
            capture_output=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "gbk"},
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode("gbk").strip()
        if "in.jsonl" in arguments:
            assert json.loads(done.stdout)["prompt"] == "\N{GRINNING FACE}"


@pytest.mark.full
@pytest.mark.slow
def test_rows_are_read_from_a_pipe_and_engine_logs_are_not_in_the_output(tmp_path: Path):
    save_model(tmp_path / "model", tied=True)
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "generate",
        "--model",
        "model",
        "--max-tokens",
        "4",
        "--verbose",
        "--input",
        "/dev/stdin",
    ]
    done = subprocess.run(
        command,
        input=b'{"prompt": "x"}\n',
        capture_output=True,
        timeout=300,
        cwd=tmp_path,
        check=True,
    )
    assert [json.loads(row)["prompt"] for row in done.stdout.splitlines()] == ["x"]
    assert b"INFO" in done.stderr
