"""The answers of msrl generate on their way out: nothing that was answered is lost, nothing is half-written."""

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
from msrl.workflows.serve.answers import line, opened, takes_no_unicode
from support import assert_mentions, mentions
from tiny_qwen2 import save_model

COMMAND = "import sys; from msrl.cli.app import main; main()"


def test_what_was_answered_before_an_interrupt_is_kept_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), opened(out) as take:
        take('{"id": 1}\n{"id": 2}\n')
        raise KeyboardInterrupt
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl.partial"]
    assert (tmp_path / "new" / "out.jsonl.partial").read_text() == '{"id": 1}\n{"id": 2}\n'
    assert_mentions(capsys.readouterr().err, f"{out}.partial", "rows")


def test_an_interrupt_before_the_first_answer_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "out.jsonl"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_more_is_one_message_and_the_rows_that_it_took_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))  # bytes of a file, in which pytest keeps what is printed too, but for capsys
    try:
        with pytest.raises(MsrlError, match=mentions("generate.output=", "out.jsonl", "File too large")), opened(out) as take:
            take('{"id": 1}\n')
            take('{"id": 2}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out.jsonl.partial").read_text() == '{"id": 1}\n'
    assert_mentions(capsys.readouterr().err, "out.jsonl.partial", "rows")


def test_rows_go_into_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with opened(None) as take:
        take("a\n")
        assert pipe.getvalue() == "a\n"


def test_on_a_terminal_answers_wait_for_the_end_of_the_bar_and_come_after_an_interrupt_too(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(KeyboardInterrupt), opened(None) as take:
        monkeypatch.setattr(sys, "stdout", io.StringIO())  # as the bar does
        take("a\n")
        assert terminal.getvalue() == ""
        raise KeyboardInterrupt
    assert terminal.getvalue() == "a\n"


def test_rows_are_escaped_for_an_output_that_has_not_all_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    completion = Completion(np.array([1]), np.array([0.0], np.float32), "stop", 0, "\N{GRINNING FACE}")
    assert json.loads(line({"id": "ü"}, [completion], (), is_ascii=True)) == json.loads(line({"id": "ü"}, [completion], ()))
    assert line({"id": "ü"}, [completion], (), is_ascii=True).isascii()
    for encoding, wanted in (("gbk", True), ("utf-8", False), ("UTF8", False)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert takes_no_unicode(None) == wanted
        assert not takes_no_unicode(tmp_path)


@pytest.mark.slow
def test_answers_are_shown_in_a_locale_that_has_not_all_letters(tmp_path: Path):
    save_model(tmp_path / "model", tied=True)
    (tmp_path / "in.jsonl").write_text('{"prompt": "\N{GRINNING FACE}"}\n', encoding="utf-8")
    common = ["--model", "model", "--max-tokens", "30", "--temperature", "1"]
    for command, said in (("generate", ["--input", "in.jsonl"]), ("generate", ["--prompt", "x"]), ("chat", [])):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, command, *common, *said],
            input=b"hello\n", capture_output=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "gbk"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode("gbk").strip()
        if "in.jsonl" in said:
            assert json.loads(done.stdout)["prompt"] == "\N{GRINNING FACE}"


@pytest.mark.slow
def test_rows_come_from_a_pipe_and_logs_of_the_engine_stay_out_of_their_answers(tmp_path: Path):
    save_model(tmp_path / "model", tied=True)
    command = [sys.executable, "-c", COMMAND, "generate", "--model", "model", "--max-tokens", "4", "--verbose", "--input", "/dev/stdin"]
    done = subprocess.run(command, input=b'{"prompt": "x"}\n', capture_output=True, timeout=300, cwd=tmp_path, check=True)
    assert [json.loads(row)["prompt"] for row in done.stdout.splitlines()] == ["x"]
    assert b"INFO" in done.stderr
