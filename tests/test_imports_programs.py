"""Programs of a script that an import leaves out, and what an import ends with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msrl.importers.command import report, translate_arguments
from support import assert_mentions
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
        ("python evaluation.py --task mmlu", ("evaluation.py", "lm-evaluation-harness")),
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


@pytest.mark.parametrize(
    "lines",
    [
        ("ray start --head", "python evaluation.py --task mmlu"),
        ("python evaluation.py --task mmlu",),
        ("echo hello", "pip install x"),
        ("ray start --address 10.0.0.1:6344",),
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
    folder = Path(__file__).parents[1] / "examples" / "mindspeed"
    (tmp_path / "configs").mkdir()
    text = (folder / "grpo_quickstart.yaml").read_text()
    (tmp_path / "configs" / "grpo_quickstart.yaml").write_text(text)
    translation = translate_arguments("mindspeed-rl", [script(tmp_path, line)])
    assert_mentions(report(translation), "read as MindSpeed-RL")
