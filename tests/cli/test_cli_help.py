"""Help of the commands: complete names at 80 columns, panels, defaults, ranges and examples."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from msrl.cli.app import app
from msrl.cli.execute import key_flags
from msrl.config.facts import key_facts
from msrl.config.options import OPTIONS, options
from support import ROOT, assert_mentions
from test_cli import COMMANDS, msrl

PROGRAM: Any = typer.main.get_command(app)


def find_command(names: list[str]) -> Any:
    """Return the click command of a path of names."""
    command = PROGRAM
    for name in names:
        command = command.commands[name]
    return command


def help_text(names: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help of a command, printed in this process."""
    assert msrl(*names, "--help") == 0
    return capsys.readouterr().out


def all_commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all commands below a command."""
    below = getattr(command, "commands", {})
    return [path, *(inner for name in below for inner in all_commands(below[name], (*path, name)))]


def test_the_list_of_commands_is_complete():
    assert sorted(map(tuple, COMMANDS)) == sorted(all_commands(PROGRAM))


@pytest.mark.sample(10)
@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_shows_every_name_in_full_at_80_columns(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(names, capsys)
    command = find_command(names)
    assert text.startswith("Usage: msrl") and "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    words = set(re.findall(r"[^\s│|,]+", text.partition("\nExamples:\n")[0]))
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} <= words
    assert {*getattr(command, "commands", {})} <= words


@pytest.mark.sample(10)
@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_truncates_no_name_on_a_narrow_terminal(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "40")
    text = help_text(names, capsys).partition("\nExamples:\n")[0]
    assert all(len(line) <= 40 for line in text.splitlines())
    joined = re.sub(r"\s*│\n│\s*|\s", "", text)
    assert all(
        name in joined
        for parameter in find_command(names).params
        for name in parameter.opts
        if name.startswith("--")
    )


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (["preprocess"], "preprocess.template"),
        (["preprocess"], "preprocess.handler"),
        (["generate"], "generate.template"),
        (["convert-ckpt", "reshard"], "convert.names"),
    ],
)
@pytest.mark.parametrize("columns", [60, 80])
def test_help_splits_no_choice_between_two_lines(
    names: list[str],
    key: str,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", str(columns))
    facts = key_facts(key)
    assert facts is not None
    text = help_text(names, capsys)
    assert {*(facts.choices or facts.examples)} <= set(re.findall(r"[^\s│,\[\]]+", text))
    assert not re.search(r"\bdefault: *│|\bat *│", text)


def test_the_usage_line_names_visible_arguments_without_braces(capsys: pytest.CaptureFixture[str]):
    usages = [help_text(names, capsys).splitlines()[0] for names in (["preprocess"], ["report"])]
    assert usages == ["Usage: msrl preprocess [OPTIONS]", "Usage: msrl report [OPTIONS] RUN"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_texts_of_options_are_sentences_and_every_command_has_examples(names: list[str]):
    command = find_command(names)
    assert command.epilog
    for option in (
        parameter for parameter in command.params if parameter.param_type_name == "option"
    ):
        assert option.is_flag or option.metavar, option.name
        assert option.help[0].isupper() and option.help.endswith(".") and ";" not in option.help, (
            option.name
        )


def test_defaults_ranges_and_choices_come_from_the_schema(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    options, _, _ = help_text(["train-sft"], capsys).partition("\nExamples:")
    text = re.sub(r"\s*│\n│\s*", " ", options)
    training = {entry.split()[0]: entry for entry in re.split(r"\s(?=--)", text) if entry}
    lr = key_facts("train.optimizer.lr")
    assert lr is not None and re.search(
        rf"--lr X .*above 0.*default: {lr.default}", training["--lr"]
    )
    assert re.search(r"--tp N .*at least 1.*default: 1\]", training["--tp"])
    platforms = r"--platform NAME .*\[auto, cpu, cuda, npu\] \[default: auto\]"
    assert re.search(platforms, training["--platform"])
    tokens = [
        re.search(r"--max-tokens N .*default: (\d+)", help_text([name], capsys))
        for name in ("generate", "chat")
    ]
    assert [match and match[1] for match in tokens] == [
        str(facts.default)
        for key in ("generate", "chat")
        if (facts := key_facts(f"{key}.max_tokens"))
    ]
    assert re.search(r"--port N .*default: 6344", help_text(["cluster", "up"], capsys))


def test_options_are_in_panels(capsys: pytest.CaptureFixture[str]):
    titles = re.findall(r"^╭─ ([\w ]+) ─", help_text(["convert-ckpt", "hf2mcore"], capsys), re.M)
    assert titles == ["Checkpoint", "Parallel layout", "Format", "Configuration", "General"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_examples_of_the_help_parse(names: list[str]):
    lines = (find_command(names).epilog or "").replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        assert words.pop(0) == "msrl"
        command = PROGRAM
        while hasattr(command, "commands") and not words[0].startswith("-"):
            command = command.commands[words.pop(0)]
        if command is not PROGRAM:
            command.make_context(command.name, words)


def shown_on_a_terminal(**environment: str) -> str:
    """Return the output of `msrl --help` on a terminal of 80 columns."""
    own, other = pty.openpty()
    settings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "CI", "GITHUB_ACTIONS")
    }
    settings |= {"COLUMNS": "80", "TERM": "xterm-256color", **environment}
    program = [sys.executable, "-m", "msrl", "--help"]
    with subprocess.Popen(program, stdout=other, stderr=other, env=settings) as process:
        os.close(other)
        output = b""
        while True:
            try:
                piece = os.read(own, 65536)
            except OSError:  # Linux reports the end of a terminal as an error
                break
            if not piece:
                break
            output += piece
    os.close(own)
    assert process.returncode == 0
    return output.decode()


def test_colors_need_a_terminal_and_no_refusal(capsys: pytest.CaptureFixture[str]):
    assert "\x1b[" in shown_on_a_terminal()
    assert "\x1b[" not in shown_on_a_terminal(NO_COLOR="1")
    assert "\x1b[" not in shown_on_a_terminal(TERM="dumb")
    assert "\x1b[" not in help_text([], capsys)


def test_help_has_plain_borders_where_the_encoding_has_no_others():
    done = subprocess.run(
        [sys.executable, "-m", "msrl", "chat", "--help"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
    )
    assert b"\\u" not in done.stdout and b"+- Sampling -" in done.stdout


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted({name for option in OPTIONS for name in option.commands}))
def test_every_option_of_a_key_sets_it(name: str):
    words = {bool: [], dict: ["{}"]}
    for option in options(name):
        facts = key_facts(option.key)
        assert facts is not None, option.key
        value = next((words[kind] for kind in facts.types if kind in words), ["1"])
        context, command = PROGRAM.make_context("msrl", [], resilient_parsing=True), PROGRAM
        for word in name.split():
            command = command.commands[word]
            required = ["folder"] if any(item.required for item in command.params) else []
            line = [] if hasattr(command, "commands") else [option.names[0], *value, *required]
            context = command.make_context(word, line, parent=context, resilient_parsing=not line)
        assert [flag.key for flag in key_flags(context)] == [option.key], option.names


def test_the_documentation_lists_the_other_names_of_options_and_their_keys():
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for names in all_commands(PROGRAM):
        for parameter in find_command([*names]).params:
            missing = [
                name
                for name in parameter.opts
                if len(parameter.opts) > 1 and name.startswith("--") and f"`{name}`" not in text
            ]
            assert not missing or parameter.opts[-1] in ("-c", "-v", "-h", "-o"), missing
    rows = re.findall(r"^\| `--(\w+)` \| `([\w.]+)` \|", text, re.M)
    keys = {option.names[0]: option.key for option in options("train-sft")}
    assert [(name, keys[f"--{name}"]) for name, _ in rows] == rows and len(rows) == 9


@pytest.mark.parametrize("group", ["", "config ", "cluster "])
def test_an_unknown_command_names_the_help_of_its_group(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert msrl(*group.split(), "zzz") == 2
    assert_mentions(capsys.readouterr().err, "zzz", f"`msrl {group}--help`")
