"""`msrl config import` validates its result and reports every key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from msrl.errors import MsrlError
from msrl.importers.command import report, translate_arguments
from msrl.importers.status import HEADINGS
from msrl.workflows.import_config import validate
from support import ROOT, assert_mentions, mentions
from test_cli import msrl

TUNE = (
    "posttrain_gpt.py --stage sft --finetune --load ckpt --data-path data --lr 1e-5 --min-lr 0 "
    "--global-batch-size 16 --train-iters 20 --tokenizer-name-or-path hf"
)


def test_an_import_with_an_invalid_result_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "native.yaml")
    command = ["config", "import", "--from", "mindspeed-llm", "--output", output, "--"]
    assert msrl(*command, *TUNE.split()) == 0
    assert_mentions(capsys.readouterr().err, "before a run: ", "data.train=data")
    assert msrl(*command, *TUNE.split(), "--prompt-type", "no_such_template") == 2
    assert_mentions(capsys.readouterr().err, "model.template=no_such_template", "template")


def test_an_invalid_result_has_no_file_and_replaces_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "native.yaml"
    wrong = ["--", *TUNE.split(), "--prompt-type", "no_such_template"]
    command = ["config", "import", "--from", "mindspeed-llm"]
    assert msrl(*command, "--output", str(output), *wrong) == 2
    assert not output.exists() and not list(tmp_path.iterdir())
    assert_mentions(capsys.readouterr().err, "native.yaml", "not written")
    output.write_text("earlier")
    assert msrl(*command, "--output", str(output), *wrong) == 2
    assert output.read_text() == "earlier"
    capsys.readouterr()
    assert msrl(*command, *wrong) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert_mentions(captured.err, "model.template=no_such_template", "not written")


def test_files_of_another_machine_are_named_but_not_errors() -> None:
    validation = validate(translate_arguments("mindspeed-llm", TUNE.split()))
    assert validation.commands == ("train-sft",) and not validation.errors
    assert {line.split(": ")[1].split("=")[0] for line in validation.inputs} == {
        "data.train",
        "model.path",
        "model.tokenizer",
        "checkpoint.load",
    }


def test_every_key_of_a_report_is_in_one_of_five_groups() -> None:
    translation = translate_arguments("mindspeed-llm", [*TUNE.split(), "--o2-optimizer"])
    lines = report(translation).splitlines()
    assert len(HEADINGS) == 5
    assert "dropped:" in lines
    assert_mentions(lines[lines.index("dropped:") + 1], "o2_optimizer", "float32")


def test_a_key_that_only_the_original_has_is_called_that() -> None:
    with pytest.raises(MsrlError, match=mentions("retro_add_retriever", "not supported")):
        translate_arguments("mindspeed-llm", [*TUNE.split(), "--retro-add-retriever"])
    with pytest.raises(MsrlError, match=mentions("sed=1", "unknown", "'seed'")):
        translate_arguments("mindspeed-llm", [*TUNE.split(), "--sed", "1"])


def test_a_training_without_weights_is_refused() -> None:
    with pytest.raises(MsrlError, match=mentions("load", "random")):
        translate_arguments("mindspeed-llm", TUNE.replace("--load ckpt", "").split())


def test_other_stages_are_refused_in_one_line() -> None:
    with pytest.raises(MsrlError, match=mentions("stage=trl_ppo", "RL")) as caught:
        translate_arguments(
            "mindspeed-llm", [*TUNE.replace("stage sft", "stage trl_ppo").split(), "--fp16"]
        )
    assert "\n" not in str(caught.value)


def test_distributed_inference_has_an_engine_of_several_devices() -> None:
    line = "inference.py --load ckpt --task greedy --tensor-model-parallel-size 4"
    translation = translate_arguments("mindspeed-llm", line.split())
    validation = validate(translation)
    assert validation.commands == ("generate",) and not validation.errors
    translation = translate_arguments(
        "mindspeed-llm", [*line.split(), "--pipeline-model-parallel-size", "2"]
    )
    assert_mentions(report(translation), "rollout.engine.tp: 8")


def test_a_conversion_of_a_reward_model_asks_for_one() -> None:
    line = "convert_ckpt.py --use-mcore-models --load-dir a --save-dir b --orm"
    translation = translate_arguments("mindspeed-llm", line.split())
    assert_mentions(report(translation), "orm=true: convert.orm: true")


@pytest.mark.slow
def test_the_benchmark_counts_a_folder_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "tune.sh").write_text(f"torchrun --nnodes 1 {TUNE}")
    (tmp_path / "wsd.sh").write_text(f"torchrun --nnodes 1 {TUNE} --split 90,5,5")
    (tmp_path / "fsdp.sh").write_text("python train_fsdp2.py x.yaml")
    (tmp_path / "other.sh").write_text("echo hello")
    command = [sys.executable, "-m", "benchmarks", "imports", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "| mindspeed-llm tune | 2 | 1 | 1 | 0 | 100% |" in result.stdout
    assert "| mindspeed-llm train_fsdp2.py | 1 | 0 | 0 | 1 | 0% |" in result.stdout
    assert_mentions(result.stdout, "1 files (1 by it alone)", "train_fsdp2.py", "not imported")
