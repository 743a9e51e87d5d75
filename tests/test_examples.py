"""Every example's configuration is read and checked as its command would, and the commands of their README are right."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from config_inputs import make_data, make_mcore, make_model
from msrl.checks.validate import check
from msrl.cli.configuration import load_configuration as load
from msrl.config.loader import Flag
from msrl.config.schema import Config
from test_cli import msrl

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HF2MCORE = (Flag("convert.command", "hf2mcore", "hf2mcore"),)
COMMANDS = {
    "sft": "train-sft",
    "grpo": "train-grpo",
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
}
# Of Qwen2.5-0.5B-Instruct; the quickstart makes a smaller one, which its own test trains.
QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the examples, an unconverted model and files of rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QWEN", "model")
    monkeypatch.setenv("GSM8K", "gsm8k")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    make_model(tmp_path / "model", **QWEN)
    make_rows(tmp_path / "gsm8k")
    return tmp_path


def make_rows(folder: Path) -> None:
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("", encoding="utf-8")


def make_what_it_reads(config: Config) -> None:
    """The checkpoint and the data that a training names, or the model that a conversion reads."""
    if config.convert.load is not None and not Path(config.convert.load).exists():
        make_model(Path(config.convert.load), **QWEN)
    if config.model.path is not None:
        checkpoint = make_mcore(Path(config.model.path))
        (checkpoint / "hf" / "config.json").write_text(
            Path("model/config.json").read_text(encoding="utf-8"), encoding="utf-8"
        )
    for prefix in (config.data.train, config.data.eval):
        if prefix is not None:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            make_data(Path(prefix))


NATIVE = [
    file for file in EXAMPLES.rglob("*.yaml") if "mindspeed" not in file.parts
]  # those: test_imports_mindspeed_rl.py


@pytest.mark.parametrize("file", sorted(NATIVE), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_configuration_is_right_for_its_command(file: Path, folder: Path):
    command = COMMANDS[file.stem.partition("_")[0]]
    flags = HF2MCORE if command == "convert-ckpt" else ()
    resolved = load([str(file)], flags=flags)
    make_what_it_reads(resolved.config)
    check(resolved, command)


@pytest.mark.parametrize("name", ["On a laptop", "On devices"])
def test_the_commands_of_gsm8k_follow_from_each_other(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [
        shlex.split(os.path.expandvars(line))
        for line in commands_of(EXAMPLES / "gsm8k" / "README.md", name)
    ]
    assert len([line for line in lines if line[0] == "msrl"]) == 7
    for line in lines:
        if line[0] == "python":
            make_model(Path(line[line.index("--out") + 1]), **QWEN)
            continue
        code = msrl(*line[1:], "--dry-run")
        assert code == 0, f"{shlex.join(line)}\n{capsys.readouterr().err}"
        leave_what_it_would_write(line)


def commands_of(readme: Path, heading: str) -> list[str]:
    """The lines of the first `bash` block below a heading."""
    text = readme.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    block = re.search(r"^```bash\n(.*?)^```", text, re.S | re.M)
    assert block is not None, f"{readme} has no commands below {heading!r}"
    return block[1].splitlines()


def leave_what_it_would_write(line: list[str]) -> None:
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
