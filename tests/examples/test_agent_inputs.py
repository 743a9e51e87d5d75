"""Inputs of the agent example, as `nox -s agent` writes them, and the checks of its runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from test_cli import msrl

EXAMPLE = ROOT / "examples" / "agent"
SCRIPT = EXAMPLE / "make_inputs.py"
COLUMNS = {"prompt": "question", "response": "answer", "extra.question": "question"}

pytestmark = pytest.mark.slow  # imports transformers


@pytest.mark.full
@pytest.mark.parametrize("task", ["lake", pytest.param("calculator", marks=pytest.mark.full)])
def test_the_inputs_of_a_task_pass_all_checks(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "inputs"
    subprocess.run([sys.executable, SCRIPT, "--out", out, "--task", task], check=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    config = json.loads((out / "model" / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"]
    assert config["eos_token_id"] == tokenizer.eos_token_id
    conversation = json.loads((out / "sft.jsonl").read_text().splitlines()[0])["messages"]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for name, count in (("rl", 1024), ("heldout", 256)):
        rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count and {*rows[0]} == {"question", "answer"}

    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE / f"{task}.yaml", tmp_path)
    texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", "r1")
    for name in ("rl", "heldout"):
        files = ("--input", f"inputs/{name}.jsonl", "--output-prefix", f"data/{name}")
        assert msrl("preprocess", *files, *texts, "--map-keys", json.dumps(COLUMNS)) == 0
    changes = ("--model", "inputs/model", "--dry-run")
    assert msrl("train-grpo", "-c", f"{task}.yaml", *changes) == 0
