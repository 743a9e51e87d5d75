"""Programs of a script that an import leaves out, and what an import ends with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msrl.importers.command import report, translate_arguments
from msrl.tracking.report import RunSummary, lines
from support import ROOT, assert_mentions
from test_cli import msrl
from test_imports_secrets import TUNE

PREPROCESS = (
    "python preprocess_data.py --input a.jsonl --output-prefix out --tokenizer-name-or-path t "
    "--handler-name AlpacaStyleInstructionHandler --prompt-type qwen"
)


def script(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "run.sh"
    file.write_text("\n".join(lines))
    return str(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train_fsdp2.py x.yaml", ("train_fsdp2.py", "FSDP2")),
        ("pip install deepspeed", ("pip install",)),
        ("wandb login 0123456789012345678901234567890123456789", ("wandb login",)),
        ("bash other/tool.sh --x 1", ("tool.sh", "another script")),
        ("nohup ./serve --port 1 &", ("serve",)),
        ("python -m vllm.entrypoints.openai.api_server --x", ("python -m vllm",)),
    ],
)
def test_every_program_that_is_left_out_is_named_with_its_line(
    line: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    translation = translate_arguments("mindspeed-llm", [script(tmp_path, PREPROCESS, line)])
    assert_mentions(report(translation), "run.sh:2", *words)
    assert "0123456789" not in report(translation)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "lines",
    [
        ("ray start --head", "python train_fsdp2.py x.yaml"),
        ("python train_fsdp2.py x.yaml",),
        ("echo hello", "pip install x"),
        ("ray start --address 10.0.0.1:6344",),
        ("export HCCL_TIMEOUT=9", "ray start --head"),
    ],
)
@pytest.mark.parametrize("system", ["mindspeed-llm", "mindspeed-rl"])
def test_a_script_of_which_nothing_is_imported_is_refused(
    system: str, lines: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "native.yaml"
    file = script(tmp_path, *lines)
    code = msrl("config", "import", "--from", system, file, "-o", str(output))
    result = capsys.readouterr()
    assert code == 2 and not output.exists()
    assert_mentions(result.err, "nothing to import")


def test_an_import_ends_with_the_next_commands_and_names_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "native.yaml"
    file = script(tmp_path, PREPROCESS, TUNE)
    code = msrl("config", "import", "--from", "mindspeed-llm", file, "-o", str(output))
    result = capsys.readouterr()
    assert code == 0
    *_, first, last = result.err.splitlines()
    assert first == f"next: msrl preprocess -c {output}"
    assert last == f"next: msrl train-sft -c {output}"
    assert yaml.safe_load(output.read_text())["run"]["name"] == "run"


def test_a_script_of_mindspeed_rl_is_reported_as_such(tmp_path: Path) -> None:
    line = "python cli/train_grpo.py --config-name grpo_quickstart"
    folder = ROOT / "examples" / "mindspeed"
    (tmp_path / "configs").mkdir()
    text = (folder / "grpo_quickstart.yaml").read_text()
    (tmp_path / "configs" / "grpo_quickstart.yaml").write_text(text)
    translation = translate_arguments("mindspeed-rl", [script(tmp_path, line)])
    assert_mentions(report(translation), "read as MindSpeed-RL")


COMMANDS = (
    "train-grpo",
    "train-sft",
    "train-dpo",
    "train-rm",
    "train-distill",
    "preprocess",
    "config show",
    "config validate",
    "doctor",
    "generate",
    "chat",
    "serve",
    "eval",
    "convert-ckpt hf2mcore",
    "cluster up",
)


@pytest.fixture
def different(tmp_path: Path) -> str:
    """Return a file of MindSpeed-RL that msrl computes differently."""
    source = ROOT / "examples" / "mindspeed" / "grpo_quickstart.yaml"
    file = tmp_path / "grpo.yaml"
    section = "actor_config:\n"
    file.write_text(source.read_text().replace(section, f"{section}  hidden_dropout: 0.1\n"))
    return str(file)


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_message_that_names_an_option_names_one_of_its_own_command(
    command: str, different: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--no-imports"] if command == "doctor" else []
    assert msrl(*command.split(), *options, "-c", different) == 2
    shown = capsys.readouterr()
    text = shown.err + shown.out
    assert_mentions(text, "hidden_dropout=0.1", "--approximate")
    msrl(*command.split(), "--help")
    is_option = "--approximate" in capsys.readouterr().out
    assert is_option or "`msrl config import --approximate`" in text


@pytest.mark.parametrize("command", ["train-grpo", "config show"])
def test_accepted_differences_are_recorded_in_the_run(
    command: str, different: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training would write them to config.yaml and report.md."""
    msrl(*command.split(), "-c", different, "--approximate", "--dry-run")
    shown = capsys.readouterr()
    if command == "config show":
        msrl("config", "show", "-c", different, "--approximate")
        assert_mentions(capsys.readouterr().out, "differences:", "hidden_dropout=0.1")
    assert "--approximate drops" not in shown.err


def test_a_report_lists_the_accepted_differences() -> None:
    summary = RunSummary(0, 0, 0, {}, {}, {})
    text = "\n".join(lines(summary, title="a", results={}, differences=["x.yaml:1: a=1: other"]))
    assert_mentions(text, "--approximate", "x.yaml:1: a=1: other")
