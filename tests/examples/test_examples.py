"""Validity of the examples' configurations and of the commands in their README."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from config_inputs import make_data, make_mcore, make_model, skip_input_checks
from families import FAMILIES
from msrl.cli.configuration import load_configuration as load
from msrl.config.loader import Flag
from msrl.config.schema import Config
from support import ROOT, checked_plan
from test_cli import msrl

EXAMPLES = ROOT / "examples"
HF2MCORE = (Flag("convert.command", "hf2mcore", "hf2mcore"),)
COMMANDS = {
    "sft": "train-sft",
    "grpo": "train-grpo",
    "rm": "train-rm",
    "distill": "train-distill",
    "lake": "train-grpo",
    "calculator": "train-grpo",
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
}
# Sizes of Qwen2.5-0.5B-Instruct. The quickstart has a smaller model and a separate test.
QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the examples, an unconverted model and dataset files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QWEN", "model")
    monkeypatch.setenv("GSM8K", "gsm8k")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    make_model(tmp_path / "model", **QWEN)
    make_rows(tmp_path / "gsm8k")
    skip_input_checks(monkeypatch)
    return tmp_path


def make_rows(folder: Path) -> None:
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("", encoding="utf-8")


def make_inputs(config: Config) -> None:
    """Create the checkpoint and data of a training configuration, or the model of a conversion."""
    if config.convert.load is not None and not Path(config.convert.load).exists():
        make_model(Path(config.convert.load), **QWEN)
    if config.model.path is not None:
        checkpoint = make_mcore(Path(config.model.path))
        text = Path("model/config.json").read_text(encoding="utf-8")
        if config.train.vision.tower_lr is not None:
            text = json.dumps(FAMILIES["qwen2.5-vl"].config)
        (checkpoint / "hf" / "config.json").write_text(text, encoding="utf-8")
    rewards = [Path(source.model) for source in config.reward.sources if source.model is not None]
    teachers = [Path(teacher.name) for teacher in config.algo.distill.on_ranks]
    for path in (*rewards, *teachers):
        architecture = "Qwen2ForSequenceClassification" if path in rewards else "Qwen2ForCausalLM"
        changes = {"architectures": [architecture], "num_labels": 1}
        sizes = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
        checkpoint = make_mcore(path)
        (checkpoint / "hf" / "config.json").write_text(
            json.dumps({**sizes, **changes}), encoding="utf-8"
        )
        (checkpoint / "hf" / "tokenizer.json").write_text("{}", encoding="utf-8")
    for prefix in (config.data.train, config.data.eval):
        if prefix is not None:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            make_data(Path(prefix))


# test_imports_mindspeed_rl.py and test_recipes.py test the others.
OTHERS = {"mindspeed", "recipes"}
NATIVE = [file for file in EXAMPLES.rglob("*.yaml") if not OTHERS & {*file.parts}]


@pytest.mark.parametrize("file", sorted(NATIVE), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_configuration_is_valid_for_its_command(file: Path, folder: Path):
    command = COMMANDS[file.stem.partition("_")[0]]
    flags = HF2MCORE if command == "convert-ckpt" else ()
    resolved = load([str(file)], flags=flags)
    make_inputs(resolved.config)
    checked_plan(resolved, command)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["On a laptop", "On devices"])
def test_each_gsm8k_command_accepts_the_output_of_the_previous_ones(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [
        shlex.split(os.path.expandvars(line))
        for line in readme_commands(EXAMPLES / "gsm8k" / "README.md", name)
    ]
    assert len([line for line in lines if line[0] == "msrl"]) == 7
    for line in lines:
        if line[0] == "python":
            make_model(Path(line[line.index("--out") + 1]), **QWEN)
            continue
        code = msrl(*line[1:], "--dry-run")
        assert code == 0, f"{shlex.join(line)}\n{capsys.readouterr().err}"
        make_outputs(line)


def readme_commands(readme: Path, heading: str) -> list[str]:
    """Return the lines of the first `bash` block below a heading."""
    text = readme.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    block = re.search(r"^```bash\n(.*?)^```", text, re.S | re.M)
    assert block is not None, f"{readme} has no commands below {heading!r}"
    return block[1].splitlines()


def make_outputs(line: list[str]) -> None:
    """Create the files that a command would write."""
    if "-c" not in line:
        return
    config = load(
        [line[line.index("-c") + 1]], flags=HF2MCORE if "convert-ckpt" in line else ()
    ).config
    if "convert-ckpt" in line:
        checkpoint = make_mcore(Path(str(config.convert.save)))
    elif "preprocess" in line:
        prefix = Path(str(config.preprocess.output_prefix))
        prefix.parent.mkdir(parents=True, exist_ok=True)
        make_data(prefix)
        return
    else:
        checkpoint = make_mcore(Path(config.run.dir, config.run.name, "checkpoints"))
    (checkpoint / "hf" / "config.json").write_text(
        Path("model/config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
