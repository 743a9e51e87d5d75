"""Rendered examples as text: `preprocess --show` and dry runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from msrl.cli import app
from msrl.data.tokenizer import open_tokenizer
from msrl.types import Prompt, RenderedExample, RenderedPreference
from msrl.workflows.shown_examples import Part, ShownExample, lines, parts
from support import assert_mentions
from test_train_from_rows import CHAT, LABELED, OPTIONS, PAIRS, STEPS, TEXTS, write
from tiny_qwen2 import make_tokenizer

HOSTILE = "[bold]x[/bold] \x1b[31mred\x07 \\x1b \u202eab\u2028c\r\n  trained, 9 tokens: 1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return path


def show(folder: Path, file: Path, *arguments: str) -> list[str]:
    """Return the lines of `msrl preprocess --show`."""
    command = ["preprocess", "--input", str(file), "--tokenizer", str(folder), *arguments]
    result = CliRunner().invoke(app.app, command)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def unescape(line: str) -> str:
    """Return the text of a shown line."""
    return re.sub(
        r"\\(\\|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[trn])",
        lambda match: "\\" if match[1] == "\\" else json.loads(f'"{_json(match[0])}"'),
        line,
    )


def _json(escape: str) -> str:
    return f"\\u00{escape[2:]}" if escape.startswith("\\x") else escape


def texts(shown: list[str]) -> list[tuple[str, str]]:
    """Return the title and the text of each part."""
    result: list[tuple[str, list[str]]] = []
    for line in shown:
        if line.startswith("    | "):
            result[-1][1].append(unescape(line[6:]))
        elif line.startswith("  "):
            result.append((line.strip(), []))
    return [(title, "\n".join(content)) for title, content in result]


def test_each_turn_shows_its_text_its_tokens_and_what_is_trained(folder: Path, tmp_path: Path):
    turns = [("user", "q1"), ("assistant", "first\nline"), ("user", "q2"), ("assistant", "second")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    file = write(tmp_path / "rows.jsonl", [row, {"messages": row["messages"][:1]}])
    shown = show(folder, file, "--handler", "auto", "--template", "native", "--show", "5")
    assert_mentions(shown[0], f"{file}:1", "18 of them trained")
    trained = [text for title, text in texts(shown) if title.startswith("trained")]
    assert trained == ["first\nline<|im_end|>", "second<|im_end|>"]
    whole = "".join(text for _, text in texts(shown))
    assert whole == make_tokenizer().apply_chat_template(row["messages"], tokenize=False)
    assert shown[-1] == f"{file}:2: dropped: empty answer"


def test_texts_of_rows_can_neither_control_the_terminal_nor_pretend_to_be_titles(
    folder: Path, tmp_path: Path
):
    row = {"prompt": HOSTILE, "answer": HOSTILE, "n": HOSTILE}
    file = write(tmp_path / "rows.jsonl", [row])
    mapping = '{"prompt": "prompt", "response": "answer", "extra.n": "n"}'
    shown = show(
        folder,
        file,
        "--handler",
        "r1",
        "--template",
        "native",
        "--map-keys",
        mapping,
        "--show",
        "1",
    )
    assert all(line.isprintable() for line in shown)
    titles = [line for line in shown if not line.startswith("    | ")]
    assert [title.split(",")[0].strip() for title in titles[1:]] == [
        "prompt",
        "ground truth",
        "extra.n",
    ]
    by_title = dict(texts(shown))
    assert by_title["ground truth"] == by_title["extra.n"] == HOSTILE
    prompt = next(text for title, text in by_title.items() if title.startswith("prompt"))
    assert HOSTILE in prompt


@pytest.mark.parametrize(
    ("rows", "arguments", "titles"),
    [
        (CHAT, ("--handler", "auto", "--kind", "prompts"), ["prompt", "ground truth"]),
        (PAIRS, ("--handler", "pairs"), ["prompt", "chosen, trained", "chosen, context",
            "rejected, trained", "rejected, context", "values"]),
        (LABELED, ("--handler", "labeled"), ["prompt", "answer, trained", "answer, context",
            "label"]),
        (TEXTS, ("--handler", "pretrain"), ["trained"]),
        (STEPS, ("--handler", "steps", "--set", f"preprocess.options={json.dumps(OPTIONS)}"),
            ["context", "label + of", "context", "label - of", "context"]),
    ],
)  # fmt: skip
def test_every_kind_of_data_shows_its_parts(
    rows: list[Any], arguments: tuple[str, ...], titles: list[str], folder: Path, tmp_path: Path
):
    file = write(tmp_path / "rows.jsonl", rows)
    template = () if arguments[1] in ("pretrain", "steps") else ("--template", "native")
    shown = show(folder, file, *arguments, *template, "--show", "1")
    found = [re.sub(r", [\d,]+ tokens?:.*", "", title) for title, _ in texts(shown)]
    assert found == titles
    assert not list(tmp_path.glob("*.idx"))


def test_showing_rows_writes_nothing_and_needs_no_prefix(folder: Path, tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", CHAT)
    prefix = str(tmp_path / "out")
    flags = ("--handler", "auto", "--template", "native", "--show", "2")
    with_prefix = show(folder, file, *flags, "--output-prefix", prefix)
    assert with_prefix == show(folder, file, *flags)
    assert with_prefix == show(folder, file, *flags, "--dry-run")[-len(with_prefix) :]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_showing_a_file_without_rows_is_refused(folder: Path, tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", [])
    command = ["preprocess", "--input", str(file), "--tokenizer", str(folder), "--show", "2"]
    result = CliRunner().invoke(app.app, [*command, "--handler", "pretrain"])
    assert_mentions(result.exception, "preprocess.input", "rows")


def test_long_texts_are_visibly_abbreviated(folder: Path):
    tokenizer = open_tokenizer(folder)
    ids = np.full(1444, 70)
    shown = list(lines(ShownExample("x", (Part("trained", ids, True),)), tokenizer, color=False))
    assert "    ... 1,204 tokens not shown" in shown
    assert sum(len(line) - 6 for line in shown if line.startswith("    | ")) == 240
    many = ShownExample("x", tuple(Part(str(i), np.array([70, 71])) for i in range(100)))
    shown = list(lines(many, tokenizer, color=False))
    assert "  ... 76 parts with 152 tokens not shown" in shown
    assert sum("tokens: 70 71" in line for line in shown) == 24
    text = list(lines(ShownExample("x", (Part("extra", "a" * 2500),)), tokenizer, color=False))
    assert text[-1] == "    ... 500 characters not shown"


def test_color_marks_exactly_the_trained_text(folder: Path):
    tokenizer = open_tokenizer(folder)
    example = RenderedExample(np.array([70, 71, 72]), np.array([False, True, True]))
    shown = ShownExample("x", parts("sft", example, tokenizer))
    colored, plain = (list(lines(shown, tokenizer, color=color)) for color in (True, False))
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == plain
    assert [("\x1b[" in line) for line in colored] == [False, False, False, False, True]


def test_parts_hold_every_token_once(folder: Path):
    tokenizer = open_tokenizer(folder)
    ids = np.arange(3, 40)
    mask = np.arange(37) % 5 > 2
    sides = tuple(RenderedExample(ids + shift * (np.arange(37) >= 3), mask) for shift in (0, 1))
    for kind, item, expected in (
        ("sft", RenderedExample(ids, mask), ids.tolist()),
        ("prompts", Prompt(0, ids, "a"), ids.tolist()),
        ("pairs", RenderedPreference(sides, 0.0, 1.0), [*ids.tolist(), *sides[1].token_ids[3:]]),
        ("pretrain", ids, ids.tolist()),
    ):
        shown = [part.content for part in parts(kind, item, tokenizer)]
        tokens = [token for part in shown if not isinstance(part, str) for token in part.tolist()]
        assert tokens == expected
