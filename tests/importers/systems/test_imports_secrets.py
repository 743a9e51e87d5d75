"""Secrets in files of other systems are neither written nor printed by any importer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.secrets import holds_secret, is_secret_name, mask_secrets
from support import ROOT, assert_mentions
from test_cli import msrl

SECRET = "s3cret-of-a-user"
SECRETS = "  wandb_project: https://me:hunter2@host\n  use_wandb: true\n"
TUNE = (
    "python posttrain_gpt.py --stage sft --finetune --load ckpt --data-path data --lr 1e-5 "
    "--global-batch-size 16 --train-iters 20"
)
LITERALS = {
    "wandb_project": "0123456789abcdef0123456789abcdef01234567",
    "save": "https://user:hunter2@host/folder",
    "load": "s3://bucket/a?token=hunter2",
    "tensorboard_dir": "hf_abcdefghijklmnopqrstuvwxyz",
}


def script(tmp_path: Path, text: str) -> str:
    file = tmp_path / "tune.sh"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "SECRET_X", "HF_TOKEN", "MY_PASSWORD"])
@pytest.mark.parametrize("is_exported", [True, False])
def test_the_value_of_a_secret_variable_is_written_as_a_reference(
    name: str, is_exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    before = "" if is_exported else f"{name}={SECRET}\n"
    text = f"{before}DIR=${name}/x\n{TUNE} --wandb-project ${{{name}}} --save $DIR"
    translation = translate_arguments("mindspeed-llm", [script(tmp_path, text)])
    written = native_yaml(translation)
    tree = yaml.safe_load(written)
    assert tree["log"]["options"]["wandb"]["project"] == f"${{env:{name}}}"
    assert tree["checkpoint"]["save"] == f"${{env:{name}}}/x"
    assert SECRET not in written + report(translation)


def test_an_import_prints_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET_X", SECRET)
    file = script(tmp_path, f"{TUNE} --tokenizer-name-or-path $SECRET_X/tok")
    code = msrl("config", "import", "--from", "mindspeed-llm", file, "-o", str(tmp_path / "a"))
    result = capsys.readouterr()
    assert code == 0
    assert SECRET not in result.out + result.err + (tmp_path / "a").read_text()


def test_an_unset_variable_of_a_secret_is_named_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = script(tmp_path, f"WANDB_API_KEY={SECRET}\n{TUNE} --wandb-project $WANDB_API_KEY")
    code = msrl("config", "import", "--from", "mindspeed-llm", file)
    result = capsys.readouterr()
    assert code == 0
    assert_mentions(result.err, "WANDB_API_KEY", "not set", "Export")


@pytest.mark.parametrize("key", list(LITERALS))
def test_a_literal_secret_is_refused_and_not_printed(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{key.replace('_', '-')}"
    text = f"{TUNE} --wandb-project math {flag} '{LITERALS[key]}'"
    code = msrl("config", "import", "--from", "mindspeed-llm", script(tmp_path, text))
    result = capsys.readouterr()
    assert code == 2
    assert_mentions(result.err, f"{key}=", "***", "secret")
    assert "hunter2" not in result.err and LITERALS[key] not in result.err


def test_a_secret_in_a_yaml_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ROOT / "examples" / "mindspeed" / "grpo_quickstart.yaml"

    (tmp_path / "a.yaml").write_text(
        source.read_text().replace("rl_config:\n", "rl_config:\n" + SECRETS)
    )
    code = msrl("train-grpo", "-c", str(tmp_path / "a.yaml"), "--dry-run")
    result = capsys.readouterr()
    assert code == 2
    assert_mentions(result.err, "wandb_project", "***", "secret")
    assert "hunter2" not in result.err


def test_columns_and_special_tokens_are_no_secrets() -> None:
    ordinary = (
        "label_key INPUT_KEY MAX_TOKENS PAD_TOKEN placeholder_token map_keys TOKENIZER_PATH PWD"
    )
    assert not any(map(is_secret_name, ordinary.split()))
    assert not holds_secret({"a": ["hf_name", "runs/0123", "http://host:80/x?a=1"]})
    folder = f"models/snapshots/{'a' * 40}/x"
    assert mask_secrets(folder) == folder and not holds_secret(folder)
