"""Keys that change a number or a token are not imported as "same results" or "speed only"."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from import_changes import ROLL
from msrl.config.sources import read
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.status import KeyStatus
from msrl.importers.systems import detect_system
from msrl.importers.table import load_table
from support import assert_mentions

_NEUTRAL = (KeyStatus.SAME, KeyStatus.SPEED, KeyStatus.PLACEMENT)
_VERL = "actor_rollout_ref.actor.megatron"
# A value of each key with which the original computes something else than msrl.
CHANGING = [
    ("roll", "worker", "apply_loss_scale", False),
    ("roll", "generating_args", "num_beams", 4),
    ("roll", "strategy_config", "calculate_per_token_loss", True),
    ("roll", "strategy_config", "additional_configs", {"attention_dropout": 0.1}),
    ("roll", "strategy_config", "seed", 7),
    ("lightrft", "flags", "grad_accum_dtype", "bf16"),
    ("lightrft", "flags", "system_prompt", "You are"),
    ("lightrft", "flags", "enable_ema", True),
    ("mindspeed_rl", "rl_config", "use_dp_batch_balance", True),
    ("roll", "top", "global_template", "qwen2_5"),
    ("mindspeed_llm", "train", "sparse_mode", 4),
    ("mindspeed_llm", "train", "padded_samples", True),
    ("mindspeed_llm", "train", "cut_max_seqlen", True),
    ("mindspeed_llm", "preprocess", "pad_to_multiple_of", 8),
    ("verl", "actor_rollout_ref.model.lora", "dropout_position", "post"),
    ("verl", "actor_rollout_ref.model.lora", "lora_B_init_method", "xavier"),
    ("verl", "actor_rollout_ref.model.lora", "lora_A_init_method", "normal"),
    ("verl", "sft.data", "ignore_input_ids_mismatch", True),
    ("verl", "critic.model", "lora", {"rank": 8}),
    ("verl", _VERL, "mtp", {"enable": True}),
    ("verl", _VERL, "lora", {"rank": 8}),
    ("verl", "actor_rollout_ref.actor", "load_weight", False),
    ("verl", "actor_rollout_ref.actor", "recompute_old_log_prob", False),
]
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=a.parquet "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm critic.model.path=m "
)


def verl(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.sh"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(("system", "section", "key", "value"), CHANGING)
def test_a_key_that_changes_results_is_not_reported_as_the_same(
    system: str, section: str, key: str, value: object
) -> None:
    row = load_table(system).row(section, key)
    assert row is not None
    assert not row.is_off(value)
    status, reason = row.neutral
    assert row.refuse or row.differs or (reason and status not in _NEUTRAL)


def test_the_seed_of_rollouts_is_that_of_sampling(tmp_path: Path) -> None:
    text = VERL + "actor_rollout_ref.rollout.seed=5"
    translation = translate_arguments("verl", [verl(tmp_path, text)], approximate=True)
    assert "seed: 5 " in native_yaml(translation)


def test_a_critic_with_another_order_of_samples_is_refused(tmp_path: Path) -> None:
    text = VERL + "critic.shuffle=true"
    with pytest.raises(MsrlError) as error:
        translate_arguments("verl", [verl(tmp_path, text)], approximate=True)
    assert_mentions(error.value, "critic.shuffle=true", "critic")


@pytest.mark.parametrize("option", ["-m", "--multirun", "--cfg=job"])
def test_an_option_of_hydra_that_is_not_read_is_refused(option: str, tmp_path: Path) -> None:
    text = VERL + f"{option} trainer.nnodes=2"
    with pytest.raises(MsrlError) as error:
        translate_arguments("verl", [verl(tmp_path, text)], approximate=True)
    assert_mentions(error.value, option.partition("=")[0], "option", "hydra")


def test_words_that_a_program_reads_are_refused(tmp_path: Path) -> None:
    text = f"echo trainer.nnodes=2 | xargs -n1 {VERL}"
    with pytest.raises(MsrlError) as error:
        translate_arguments("verl", [verl(tmp_path, text)], approximate=True)
    assert_mentions(error.value, "run.sh:1", "xargs")


def test_options_of_ray_are_reported_without_their_values(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwx"
    text = VERL + f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={secret}"
    translation = translate_arguments("verl", [verl(tmp_path, text)], approximate=True)
    assert "ray_kwargs" in report(translation)
    assert secret not in report(translation) + native_yaml(translation)


def test_a_secret_in_the_text_of_a_problem_is_not_printed(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwx"
    text = f"{VERL} trainer.nnodes=$(count {secret}) x_{secret}=1"
    with pytest.raises(MsrlError) as error:
        translate_arguments("verl", [verl(tmp_path, text)])
    assert secret not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor_train.strategy_args.strategy_config.fp16": True}, "fp16=true"),
        ({"actor_infer.generating_args.num_beams": 4}, "num_beams=4"),
        ({"actor_infer.model_update_frequency": 4}, "model_update_frequency=4"),
        ({"reference.strategy_args.strategy_config.fp16": True}, "fp16=true"),
    ],
)
def test_a_refused_key_of_roll_is_refused_in_every_worker(
    changes: dict[str, object], key: str, tmp_path: Path
) -> None:
    tree = copy.deepcopy(ROLL)
    for path, value in changes.items():
        *sections, name = path.split(".")
        target = tree
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    file = tmp_path / "roll.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(MsrlError) as error:
        translate_arguments("roll", [str(file)], approximate=True)
    assert_mentions(error.value, key, "not supported")


def test_a_file_of_mindspeed_ray_is_not_one_of_verl(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("training: {lr: 1.0e-6}\nactor_rollout_ref: {actor_rollout: {}}\n")
    assert detect_system(read(file), file) == "mindspeed-llm"
