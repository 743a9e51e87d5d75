"""ROLL's files of SFT, DPO and distillation import to the commands that do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import roll_oracle as oracle
from msrl.algorithms.answers import Answers, Pairs
from msrl.algorithms.preference import dpo
from msrl.errors import MsrlError
from msrl.importers.status import KeyStatus
from msrl.workflows.import_config import validate
from support import mentions
from test_imports_losses import convert, native, statuses

SFT = """\
exp_name: sft
sequence_length: 512
pretrain: base
eval_steps: 10
prompt_key: instruction
validation: {data_args: {file_name: eval.json, template: qwen2_5}}
sft_train:
  training_args:
    num_train_epochs: 2
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
    learning_rate: 5.0e-6
  data_args: {file_name: rows.json, template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2}
  device_mapping: list(range(0,8))
"""
DPO = """\
exp_name: dpo
sequence_length: 512
pretrain: base
max_steps: 20
chosen_key: chosen
rejected_key: rejected
beta: 0.2
label_smoothing: 0.1
actor_train:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2}
  data_args: {file_name: [pairs.json]}
  device_mapping: list(range(0,4))
reference: {device_mapping: "list(range(0,4))"}
"""
DISTILL = """\
exp_name: distill
sequence_length: 1024
student_pretrain: small
teacher_pretrain: large
kd_objective: reverse_kl
student:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2}
  device_mapping: list(range(0,4))
teacher: {device_mapping: "list(range(0,4))"}
"""
ON_POLICY = """\
exp_name: opd
pretrain: small
max_steps: 5
rollout_batch_size: 16
prompt_length: 64
response_length: 128
num_return_sequences_in_group: 2
student_train:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2}
  device_mapping: list(range(0,4))
student_infer:
  generating_args: {temperature: 0.9, top_p: 0.99, top_k: 100}
  device_mapping: list(range(0,4))
teacher:
  math: {model_args: {model_name_or_path: large}, tag_included: [math], opd_kl_coef: 1.0}
  code: {model_args: {model_name_or_path: coder}, tag_included: [code], opd_kl_coef: 0.5}
"""


def test_sft_has_the_batch_the_rows_in_order_and_the_optimizer_of_the_file(tmp_path: Path) -> None:
    translation = convert("roll", SFT, tmp_path)
    tree = native(translation)
    assert tree["train"]["global_batch"] == 2 * 4 * 4
    assert tree["train"]["epochs"] == 2 and "steps" not in tree["train"]
    assert tree["data"] == {"seq_length": 512, "shuffle": False}
    assert tree["eval"] == {"every_steps": 10}
    assert tree["run"]["name"] == "sft"
    assert tree["train"]["optimizer"]["schedule"] == "linear"
    assert tree["model"]["template"] == "native"  # qwen2_5 is the tokenizer's own
    assert validate(translation).commands == ("train-sft",)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (SFT, "train-sft"),
        (DPO, "train-dpo"),
        (DISTILL, "train-distill"),
        (ON_POLICY, "train-distill"),
    ],
)
def test_each_kind_of_file_is_valid_for_its_command(
    text: str, command: str, tmp_path: Path
) -> None:
    validation = validate(convert("roll", text, tmp_path, approximate=True))
    assert validation.commands == (command,)
    assert validation.errors == ()


def test_the_loss_of_an_imported_dpo_file_is_that_of_roll(tmp_path: Path) -> None:
    section = native(convert("roll", DPO, tmp_path))["algo"]["preference"]
    assert section.pop("loss") == "dpo"
    options = section.pop("options")
    policy, reference = -10 * torch.rand(2, 2, 6, generator=torch.Generator().manual_seed(0))
    lengths = torch.ones(6)
    sides = [Answers(policy[i], lengths, reference[i]) for i in range(2)]
    pairs = Pairs(*sides, torch.zeros(6))
    ours = dpo.preference_loss(pairs, **section, **options).loss.mean()
    theirs = oracle.preference_loss(*policy, *reference, beta=0.2, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)


def test_dpo_of_v0_1_0_counts_answers_and_several_updates_per_step(tmp_path: Path) -> None:
    train = native(convert("roll", f"{DPO}train_batch_size: 64\n", tmp_path))["train"]
    assert train["global_batch"] == 4 * 2 * 4 // 2
    assert train["steps"] == 20 * 4
    with pytest.raises(MsrlError, match=mentions("train_batch_size=60", "16")):
        convert("roll", f"{DPO}train_batch_size: 60\n", tmp_path)


def test_ipo_of_sums_is_refused_or_approximated(tmp_path: Path) -> None:
    text = f"{DPO}ipo: true\n"
    with pytest.raises(MsrlError, match=mentions("ipo=true", "sums", "--approximate")):
        convert("roll", text, tmp_path)
    tree = native(convert("roll", text, tmp_path, approximate=True))
    assert tree["algo"]["preference"]["loss"] == "ipo"


@pytest.mark.parametrize("text", [DISTILL, ON_POLICY])
def test_distillation_names_what_train_distill_does_otherwise(text: str, tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("student", "--approximate")):
        convert("roll", text, tmp_path)


def test_teachers_keep_their_tags_and_weights(tmp_path: Path) -> None:
    tree: Any = native(convert("roll", ON_POLICY, tmp_path, approximate=True))
    assert tree["algo"]["distill"]["teachers"] == [
        {"model": "large", "tags": ["math"]},
        {"model": "coder", "tags": ["code"], "weight": 0.5},
    ]
    assert tree["rollout"]["sampling"]["top_k"] == 100
    tree = native(convert("roll", DISTILL, tmp_path, approximate=True))
    assert tree["algo"]["distill"]["teachers"] == [{"model": "large"}]
    assert tree["algo"]["distill"]["divergence"] == "reverse_kl"
    text = DISTILL.replace("reverse_kl", "adaptive_kl")
    with pytest.raises(MsrlError, match=mentions("kd_objective=adaptive_kl", "--approximate")):
        convert("roll", text, tmp_path)


def test_keys_of_other_pipelines_have_no_effect(tmp_path: Path) -> None:
    keys = statuses(convert("roll", f"{SFT}rollout_batch_size: 8\n", tmp_path))
    assert keys["rollout_batch_size"] is KeyStatus.DEAD


def test_distillation_of_images_is_refused(tmp_path: Path) -> None:
    text = DISTILL.replace("student:\n", "student:\n  data_args: {template: qwen2-vl}\n")
    with pytest.raises(MsrlError, match=mentions("vision-language")):
        convert("roll", text, tmp_path)
