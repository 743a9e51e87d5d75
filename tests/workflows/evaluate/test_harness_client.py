"""lm-evaluation-harness as a client of `msrl serve`: the commands of docs/evaluation.md.

`nox -s benchmarks` installs it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark_rows import ROWS
from served_commands import Server
from support import ROOT
from tiny_qwen2 import save_model

pytestmark = [pytest.mark.full, pytest.mark.slow]
PAGE = ROOT / "docs" / "evaluation.md"
DOCUMENTED = "http://127.0.0.1:8000/v1"
KEY = "a-key-of-the-tests"
# Datasets that the harness would download: it reads folders of these names instead.
DATASETS = {"gsm8k": ("openai/gsm8k", "main"), "arc_easy": ("allenai/ai2_arc", "ARC-Easy")}


def commands() -> list[str]:
    """Return the commands of the page that run the harness."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("lm_eval ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with a model of byte tokens and with rows of the datasets."""
    path = tmp_path_factory.mktemp("clients")
    save_model(path / "model", tied=False, positions=16384)
    for name, (dataset, subset) in DATASETS.items():
        files = []
        present = ROWS[name]
        for split in ("train", "validation", "test"):
            rows = present.get(split, next(iter(present.values())))
            file = path / dataset / subset / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            files.append({"split": split, "path": f"{subset}/{file.name}"})
        card = json.dumps({"configs": [{"config_name": subset, "data_files": files}]})
        (path / dataset / "README.md").write_text(f"---\n{card}\n---\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    key = folder / "key"
    key.write_text(KEY)
    words = ("--served-model-name", "grpo", "--api-key-file", str(key), "--dtype", "float32")
    served = Server(folder / "serve.log", str(folder / "model"), *words)
    yield served
    served.command.kill()


@pytest.mark.parametrize(
    "command", commands(), ids=lambda text: re.findall(r"--tasks (\w+)", text)[0]
)
def test_the_harness_evaluates_a_served_model(command: str, server: Server, folder: Path) -> None:
    pytest.importorskip("tenacity")  # of lm_eval[api]
    words = shlex.split(f"{command.replace(DOCUMENTED, server.url)} --limit 2")
    assert words[0] == "lm_eval" and server.url in command.replace(DOCUMENTED, server.url)
    cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, **cache, "OPENAI_API_KEY": KEY, "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (task,) = re.findall(r"--tasks (\w+)", command)
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"|{task}")]
    assert rows and re.search(r"\|\s*[01](\.\d+)?\s*\|", rows[0]), done.stdout
