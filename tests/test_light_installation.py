"""Commands without the packages of a platform, as `pip install msrl` alone installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from config_inputs import QWEN2
from msrl.cli.app import missing_package
from support import assert_mentions

# Runs msrl where the packages of the extras cannot be imported.
WITHOUT = """
import sys
from msrl.cli import app
class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in app._PLATFORM_MODULES | app._EXTRAS.keys():
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Blocked())
sys.argv = ["msrl", *sys.argv[1:]]
app.main()
"""
GRPO = """
model: {path: hf}
rollout: {max_prompt_tokens: 100, max_response_tokens: 100, samples_per_prompt: 4}
reward: {sources: [{verifier: math_17k_acc}, {verifier: strict_format}]}
train: {steps: 3}
"""
SCRIPT = """
python convert_ckpt.py --load-model-type hf --save-model-type mg --model-type-hf llama2 \\
    --target-tensor-parallel-size 2 --load-dir hf --save-dir new --use-mcore-models
"""


def light(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run msrl in `folder` without the optional packages."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(QWEN2))
    (folder / "grpo.yaml").write_text(GRPO)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(GRPO)
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "metrics": {}, "seconds": {}}\n')
    (folder / "convert.yaml").write_text("convert: {command: hf2mcore, load: hf, save: new}\n")
    (folder / "convert.sh").write_text(SCRIPT)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "train-grpo --help",
        "config show -c grpo.yaml",
        "config validate -c convert.yaml",
        "config import --from mindspeed-llm convert.sh",
        "config schema",
        "view run",
    ],
)
def test_what_login_nodes_do_needs_no_optional_package(words: str, folder: Path) -> None:
    done = light(folder, *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "generate --model hf --prompt x",
        "chat --model hf",
        "serve hf",
        "convert-ckpt hf2mcore --load hf --save new",
        "cluster status",
    ],
)
def test_other_commands_name_the_extra_in_one_line(words: str, folder: Path) -> None:
    done = light(folder, *words.split())
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert_mentions(lines[0], "not installed", "msrl[cpu]", "cuda", "npu")
    assert not (folder / "new").exists()


def test_a_missing_module_of_another_package_keeps_its_traceback() -> None:
    assert missing_package(ModuleNotFoundError("x", name="my_rewards")) is None
    assert missing_package(ModuleNotFoundError("x", name="torch.nothing")) is None
    assert "msrl[wandb]" in (missing_package(ModuleNotFoundError("x", name="wandb")) or "")
