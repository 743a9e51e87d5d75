"""Messages name only options that their command has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import msrl
from msrl.cli import app
from msrl.cli.own_options import _OPTION, _SENTENCE_END, _is_named, all_commands, with_own_options
from msrl.config.messages import keys
from support import assert_mentions
from test_cli import msrl as run

COMMANDS = dict(all_commands(get_command(app.app)))
OPTIONS = {option for options in COMMANDS.values() for option in options}
PACKAGE = Path(msrl.__file__).parent
# Options of other programs that messages name, or that msrl passes to them.
OTHER_PROGRAMS = {
    "cluster": "ray start",
    "importers": "the systems whose files are read",
    "checkpoint/gguf": "llama.cpp",
    "checkpoint/mcore": "MindSpeed-LLM",
    "checkpoint/prediction_layers.py": "MindSpeed-LLM",
    "errors.py": "hf download",
    "workflows/doctor.py": "docker run",
    "rollout/server.py": "vLLM",
}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def texts() -> Iterator[tuple[str, str]]:
    """Yield the file and the text of strings but docstrings; `{}` for what is filled in.

    Files without an option are left out.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        if "--" not in (code := path.read_text()):
            continue
        tree = ast.parse(code)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
        skipped = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
                ]
                skipped |= {id(part) for part in node.values}
                yield str(path.relative_to(PACKAGE)), "".join(map(str, parts))
            elif is_text(node) and id(node) not in skipped:
                yield str(path.relative_to(PACKAGE)), node.value  # pyright: ignore


@cache
def texts_with_options() -> list[tuple[str, str]]:
    return [(file, text) for file, text in texts() if _OPTION.search(text)]


def test_every_option_in_a_message_exists() -> None:
    assert len(texts_with_options()) > 100
    unknown = [
        (file, match[1])
        for file, text in texts_with_options()
        for match in _OPTION.finditer(text)
        if match[1] not in OPTIONS and not file.startswith(("cli/", *OTHER_PROGRAMS))
    ]
    assert unknown == []


def test_a_command_in_a_message_has_the_options_that_follow_it() -> None:
    wrong: list[tuple[str, str]] = []
    for file, text in texts_with_options():
        for command in re.finditer(r"msrl ((?:[a-z0-9-]+ )+)((?:(?!msrl )[^`.;])*)", text):
            words = command[1].split()
            names = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
            for option in _OPTION.finditer(command[2]):
                if not any(option[1] in COMMANDS[name] for name in names):
                    wrong.append((file, f"{command[1]}{option[1]}"))
    assert wrong == []


def test_no_message_names_an_option_that_its_command_does_not_have() -> None:
    """Whichever command raises it: the option becomes a key, or is named with its command."""
    valid = set(keys())
    for file, text in texts_with_options():
        for own, options in COMMANDS.items():
            shown = with_own_options(text, own, COMMANDS)
            for match in _OPTION.finditer(shown):
                sentence = _SENTENCE_END.split(shown[: match.start()])[-1]
                having = [name for name, known in COMMANDS.items() if match[1] in known]
                is_named = any(_is_named(name, sentence) for name in having)
                assert not having or match[1] in options or is_named, (file, own, shown)
            for key in re.findall(r"--set ([a-z_]+\.[a-z_.]+)=", shown):
                assert key in valid or key in text, (file, own, shown)


@pytest.mark.parametrize(
    ("own", "text", "expected"),
    [
        ("preprocess", "Name it with --map-keys '{}'.", "Name it with --map-keys '{}'."),
        ("train-sft", "Set --map-keys '{}'.", "Set --set preprocess.map_keys='{}'."),
        ("train-sft", "Add --overwrite.", "Add --set preprocess.overwrite=true."),
        ("train-sft", "Use --dtype.", "Use msrl convert-ckpt hf2mcore --dtype."),
        ("convert-ckpt inspect", "Name it with --hf-config.", "Name it with convert.hf_config."),
        ("generate", "Add --force.", "Add msrl cluster down --force."),
        ("serve", "Use msrl convert-ckpt hf2hf --lora.", "Use msrl convert-ckpt hf2hf --lora."),
        ("train-sft", "Set preprocess.split, as in --split a, or name files.",
         "Set preprocess.split, as in --set preprocess.split=a, or name files."),
        ("train-sft", "written with --mla-mm-split, but", "written with --mla-mm-split, but"),
    ],
)  # fmt: skip
def test_an_option_of_another_command_is_a_key_or_named_with_it(
    own: str, text: str, expected: str
) -> None:
    assert with_own_options(text, own, COMMANDS) == expected


def test_options_of_all_commands_set_keys_or_are_for_one_command() -> None:
    assert COMMANDS["preprocess"]["--map-keys"].key == "preprocess.map_keys"


def test_an_error_of_a_command_names_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mcore").mkdir()
    assert run("convert-ckpt", "inspect", str(tmp_path / "mcore")) == 2
    assert_mentions(capsys.readouterr().err, "mcore")
