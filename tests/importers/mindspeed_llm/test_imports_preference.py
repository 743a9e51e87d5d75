"""Import of MindSpeed's scripts and files for DPO, SimPO and outcome reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.workflows.import_config import validate
from support import mentions

TUNE = (
    "posttrain_gpt.py --stage {stage} --finetune --load ckpt --data-path data --lr 1e-6 "
    "--min-lr 0 --global-batch-size 16 --train-iters 20 --tokenizer-name-or-path hf "
    "--is-pairwise-dataset {more}"
)


def convert(stage: str, more: str = "") -> Any:
    return translate_arguments("mindspeed-llm", TUNE.format(stage=stage, more=more).split())


def native(translation: Any) -> dict[str, Any]:
    return yaml.safe_load(native_yaml(translation))


@pytest.mark.parametrize(
    ("stage", "more", "expected"),
    [
        ("dpo", "", {"loss": "dpo", "beta": 0.1, "sft_coef": 0.0}),
        (
            "dpo",
            "--dpo-loss-type hinge --dpo-beta 0.2 --pref-ftx 0.5",
            {"loss": "dpo", "beta": 0.2, "sft_coef": 0.5, "options": {"form": "hinge"}},
        ),
        ("dpo", "--dpo-loss-type ipo", {"loss": "ipo", "beta": 0.1, "sft_coef": 0.0}),
        (
            "dpo",
            "--dpo-label-smoothing 0.1",
            {"loss": "dpo", "beta": 0.1, "sft_coef": 0.0, "options": {"label_smoothing": 0.1}},
        ),
        # The original's defaults: beta 2.5 and gamma 1.4 times as large.
        ("simpo", "", {"loss": "simpo", "beta": 2.5, "sft_coef": 0.0, "options": {"gamma": 3.5}}),
        (
            "simpo",
            "--simpo-beta 2.0 --gamma-beta-ratio 0.5 --dpo-beta 0.3",
            {"loss": "simpo", "beta": 2.0, "sft_coef": 0.0, "options": {"gamma": 1.0}},
        ),
    ],
)
def test_stages_of_preference_data_become_train_dpo(
    stage: str, more: str, expected: dict[str, Any]
) -> None:
    translation = convert(stage, more)
    validation = validate(translation)
    assert (validation.commands, validation.errors) == (("train-dpo",), ())
    assert native(translation)["algo"]["preference"] == expected


def test_the_reference_is_loaded_from_its_own_folder() -> None:
    tree = native(convert("dpo", "--ref-model sft --refer-model-iter 1"))
    assert tree["cluster"]["roles"]["reference"] == {"load": "sft"}
    with pytest.raises(MsrlError, match=mentions("refer_model_iter=7", "iteration")):
        convert("dpo", "--ref-model sft --refer-model-iter 7")


LORA = "--lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj --lora-load earlier"


def test_adapters_start_from_those_of_an_earlier_training() -> None:
    translation = convert("dpo", LORA)
    assert not validate(translation).errors
    assert native(translation)["train"]["lora"] == {
        "rank": 8,
        "alpha": 16.0,
        "targets": ["linear_qkv", "linear_proj"],
        "load": "earlier",
    }
    assert "cluster" not in native(translation)
    text = TUNE.replace("--finetune", "--no-load-optim").format(stage="dpo", more=LORA)
    tree = native(translate_arguments("mindspeed-llm", text.split()))
    assert tree["cluster"]["roles"]["reference"] == {"load": "ckpt"}
    assert tree["checkpoint"]["load"] == "ckpt"


def test_adapters_without_finetune_are_a_training_that_is_resumed() -> None:
    text = TUNE.replace("--finetune", "").format(stage="dpo", more=LORA)
    tree = native(translate_arguments("mindspeed-llm", text.split()))
    assert tree["checkpoint"] == {"load": "ckpt", "resume": "earlier"}
    assert "load" not in tree["train"]["lora"] and "cluster" not in tree


@pytest.mark.parametrize("flags", ["--finetune", "--no-load-optim", ""])
def test_adapters_are_not_read_without_target_modules(flags: str) -> None:
    text = TUNE.replace("--finetune", flags).format(stage="dpo", more="--lora-load earlier")
    tree = native(translate_arguments("mindspeed-llm", text.split()))
    assert "earlier" not in str(tree) and "cluster" not in tree


def test_a_reference_without_the_adapters_of_the_original_is_reported() -> None:
    with pytest.raises(MsrlError, match=mentions("ref_model=sft", "adapters", "--approximate")):
        convert("dpo", f"{LORA} --ref-model sft")
    assert "cluster" not in native(convert("dpo", f"{LORA} --ref-model ckpt/"))
    text = TUNE.replace("--finetune", "--no-load-optim").format(stage="dpo", more=LORA)
    tree = native(translate_arguments("mindspeed-llm", [*text.split(), "--ref-model", "sft"]))
    assert tree["cluster"]["roles"]["reference"] == {"load": "sft"}


def test_stage_orm_becomes_train_rm() -> None:
    translation = convert("orm", "--load-checkpoint-loosely")
    assert validate(translation).commands == ("train-rm",)
    assert not validate(translation).errors
    assert native(translation)["algo"] == {"reward_model": {"kind": "outcome"}}


PRM = TUNE.replace("--is-pairwise-dataset", "--is-instruction-dataset")
STEPS = "--placeholder-token ки --reward-tokens + -"


def test_stage_prm_becomes_train_rm_of_labeled_steps() -> None:
    text = PRM.format(stage="prm", more=STEPS)
    translation = translate_arguments("mindspeed-llm", text.split())
    validation = validate(translation)
    assert (validation.commands, validation.errors) == (("train-rm",), ())
    expected = {"kind": "process", "reward_tokens": ["+", "-"]}
    assert native(translation)["algo"] == {"reward_model": expected}
    with pytest.raises(MsrlError, match=mentions("reward_tokens", "missing")):
        translate_arguments("mindspeed-llm", PRM.format(stage="prm", more="").split())


def test_preprocessing_of_labeled_steps_is_imported() -> None:
    text = (
        "preprocess_data.py --input rows.parquet --handler-name AlpacaStyleProcessRewardHandler "
        f"--tokenizer-name-or-path hf --output-prefix data --seq-length 4096 {STEPS}"
    )
    translation = translate_arguments("mindspeed-llm", text.split())
    assert not validate(translation).errors
    tokens = {"placeholder_token": "ки", "reward_tokens": ["+", "-"]}
    assert native(translation)["preprocess"]["options"] == tokens
    plain = text.replace("AlpacaStyleProcessRewardHandler", "AlpacaStyleInstructionHandler")
    translation = translate_arguments("mindspeed-llm", plain.split())
    assert "options" not in native(translation)["preprocess"]


@pytest.mark.parametrize(
    ("stage", "more", "fragments"),
    [
        ("dpo", "--dpo-loss-type kto_pair", ("dpo_loss_type", "kto_pair", "hinge")),
        ("simpo", "--simpo-loss-type ipo", ("simpo_loss_type", "ipo", "hinge")),
        ("sft", "", ("is_pairwise_dataset", "true", "dpo")),
        ("sft", "--load-checkpoint-loosely", ("load_checkpoint_loosely", "complete")),
    ],
)
def test_values_without_a_counterpart_are_refused(
    stage: str, more: str, fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        convert(stage, more)


def test_keys_of_other_stages_have_no_effect() -> None:
    text = TUNE.format(stage="sft", more="--dpo-beta 0.3").replace("--is-pairwise-dataset", "")
    tree = native(translate_arguments("mindspeed-llm", text.split()))
    assert "preference" not in tree["algo"]


def test_pretraining_without_a_checkpoint_starts_from_random_weights() -> None:
    text = (
        "pretrain_gpt.py --data-path text_text_document --lr 1e-4 --min-lr 0 --seq-length 64 "
        "--global-batch-size 16 --train-iters 20 --tokenizer-name-or-path hf"
    )
    tree = native(translate_arguments("mindspeed-llm", text.split()))
    assert (tree["model"]["init"], tree["data"]["handler"]) == ("random", "pretrain")


FILE = """
defaults:
  - model: [qwen3_30b_a3b]
megatron_training:
  stage: dpo
  is_pairwise_dataset: true
  dpo_loss_type: sigmoid
  finetune: true
  load: ckpt
  ref_model: sft
  data_path: pairs
  tokenizer_name_or_path: hf
  global_batch_size: 64
  micro_batch_size: 1
  train_iters: 10
  lr: 5e-8
  bf16: true
"""


def test_files_of_mindspeed_rl_for_dpo_are_read(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(FILE)
    translation = translate_arguments("mindspeed-rl", [str(file)])
    validation = validate(translation)
    assert (validation.commands, validation.errors) == (("train-dpo",), ())
    tree = native(translation)
    assert tree["algo"]["preference"]["loss"] == "dpo"
    assert tree["cluster"]["roles"]["reference"] == {"load": "sft"}
    assert tree["train"]["global_batch"] == 64


@pytest.mark.parametrize("name", ["AlpacaStylePairwiseHandler", "SharegptStylePairwiseHandler"])
def test_preprocessing_of_pairs_is_imported(name: str) -> None:
    text = (
        f"preprocess_data.py --input rows.json --handler-name {name} --tokenizer-name-or-path hf "
        "--output-prefix data --prompt-type qwen --seq-length 4096"
    )
    translation = translate_arguments("mindspeed-llm", text.split())
    assert native(translation)["preprocess"]["handler"] == name
    assert not validate(translation).errors
