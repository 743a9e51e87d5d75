"""Chat templates of hostile models in every command that renders them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from msrl.chat_rendering import client as chat_rendering
from support import assert_each_mentions
from test_cli import msrl
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import children

TEMPLATES = {
    "endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "longer",
    ),
    "memory": ("{% set a = ['x' * 10 ** 6] * 10 %}{{ (a * 10 ** 8) | length }}", "memory"),
    "output": ("{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() | list }}", "unsafe"),
    "attributes of functions": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "attributes of a format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    "attributes of a filter": (
        "{{ (messages | map(attribute='__class__') | first).__mro__ }}",
        "unsafe",
    ),
    "a name that is computed": ("{{ ('' | attr('__cl' ~ 'ass__')).__mro__ }}", "unsafe"),
}
COMMANDS = {
    "preprocess": ["preprocess", "--input", "rows.jsonl", "--tokenizer", "{model}",
                   "--template", "native", "--handler", "auto", "--output-prefix", "data"],
    "generate": ["generate", "{model}", "--prompt", "2+2?"],
    "chat": ["chat", "{model}"],
    "serve": ["serve", "{model}"],
    "eval": ["eval", "{model}", "--data", "rows.jsonl",
             "--set", "reward.sources=[{{verifier: acc}}]"],
}  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    save_model(path, tied=True)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a working folder with rows, and fail if processes or files stay."""
    temporary_folder = tmp_path / "tmp"
    temporary_folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary_folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    limits = chat_rendering.RenderingLimits(time_s=0.5, characters=10**6, memory_bytes=1 << 27)
    monkeypatch.setattr(chat_rendering, "LIMITS", limits)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "answer": "4"}) + "\n")
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"model", "rows.jsonl", "tmp"}
    assert list(temporary_folder.iterdir()) == []


# Outside of the full table, every template and every command.
USUAL = {
    *(("preprocess", name) for name in TEMPLATES if name != "endless loop"),
    *((command, "attributes") for command in COMMANDS),
    ("eval", "endless loop"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.full)
        for pair in itertools.product(COMMANDS, TEMPLATES)
    ],
)
def test_a_hostile_template_ends_every_command_with_one_message(
    name: str, command: str, weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    template, keyword = TEMPLATES[name]
    model = shutil.copytree(weights, tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    words = [word.format(model=model) for word in COMMANDS[command]]
    before = children(os.getpid()).keys()
    assert msrl(*words) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert_each_mentions(error.splitlines(), (model, keyword))
    new = children(os.getpid()).keys() - before
    assert all("chat_rendering" in children(os.getpid()).get(pid, "") for pid in new)
