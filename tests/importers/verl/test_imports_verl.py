"""Import of verl's scripts and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrl.errors import ManyErrors, MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.translation import Translation
from msrl.workflows.import_config import validate
from support import assert_mentions, mentions
from test_imports_losses import native

SCRIPT = """\
#!/usr/bin/env bash
set -x
python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.rollout.name=vllm \\
"""


def imported_script(lines: list[str], folder: Path, *, approximate: bool = False) -> Translation:
    """Return the translation of a script with these changes of keys."""
    file = folder / "run.sh"
    file.write_text(SCRIPT + "".join(f"    {line} \\\n" for line in lines) + "    $@\n")
    return translate_arguments("verl", [str(file)], approximate=approximate)


def values(lines: list[str], folder: Path, **options: Any) -> dict[str, Any]:
    """Return the native values of a script by dotted key."""
    return _flat(native(imported_script(lines, folder, **options)), "")


def _flat(tree: dict[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        found |= _flat(value, name) if isinstance(value, dict) and value else {name: value}
    return found


def errors(lines: list[str], folder: Path, **options: Any) -> str:
    """Return the messages of a script that is refused."""
    with pytest.raises(ManyErrors) as caught:
        imported_script(lines, folder, **options)
    return "\n".join(caught.value.messages)


def imported_file(text: str, folder: Path, name: str = "ppo.yaml") -> Translation:
    file = folder / name
    file.write_text(text)
    return translate_arguments("verl", [str(file)])


def test_a_script_without_changes_is_the_run_of_verl_s_defaults(tmp_path: Path) -> None:
    found = values([], tmp_path)
    expected = {
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambda": 1.0,
        "algo.advantage.whiten": True,
        "algo.aggregate.mode": "token-mean",
        "algo.clip.low": 0.2,
        "algo.clip.high": 0.2,
        "algo.clip.dual": 3.0,
        "algo.value.clip": 0.5,
        "rollout.prompts_per_step": 1024,
        "rollout.samples_per_prompt": 1,
        "rollout.max_prompt_tokens": 512,
        "rollout.engine.tp": 2,
        "train.updates.samples_per_update": 256,
        "train.updates.shuffle": False,
        "train.optimizer.lr": 1e-6,
        "train.optimizer.weight_decay": 0.01,
        "train.optimizer.betas": [0.9, 0.999],
        "train.recompute.granularity": "full",
        "train.epochs": 30,
        "cluster.devices_per_node": 8,
        "cluster.roles.critic.optimizer.lr": 1e-5,
        "checkpoint.resume": "auto",
        "eval.at_start": True,
        "eval.sampling.temperature": 0.0,
        "run.name": "gsm8k",
        "model.path": "Qwen/Qwen3-8B",
    }
    assert {key: found.get(key) for key in expected} == expected


def test_an_import_of_a_script_is_valid_for_its_command(tmp_path: Path) -> None:
    validation = validate(imported_script(["algorithm.adv_estimator=gae"], tmp_path))
    assert validation.commands == ("train-grpo",) and not validation.errors


def test_one_file_of_rows_trains_as_it_is_and_several_are_written_first(tmp_path: Path) -> None:
    found = values(["data.train_files=a.parquet", "data.prompt_key=question"], tmp_path)
    assert (found["data.train"], found.get("preprocess.input")) == ("a.parquet", None)
    columns = {"extra.tag": "data_source", "messages": "question"}
    translation = imported_script(["data.prompt_key=question"], tmp_path)
    assert native(translation)["preprocess"]["map_keys"] == columns
    found = values(["data.train_files=[a.parquet,b.parquet]"], tmp_path)
    assert found["preprocess.input"] == ["a.parquet", "b.parquet"]
    assert found["data.train"] == found["preprocess.output_prefix"]


def test_without_balancing_updates_take_the_samples_of_the_original_s_ranks(tmp_path: Path) -> None:
    lines = [
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "trainer.balance_batch=False",
        "trainer.use_v1=False",
    ]
    translation = imported_script(lines, tmp_path)
    assert _flat(native(translation), "")["train.updates.shards"] == 4
    balance = "balances lengths"
    assert not any(balance in line for line in translation.remarks)
    assert any(balance in line for line in imported_script([], tmp_path).remarks)


def test_the_trainer_v1_balances_whatever_the_file_says(tmp_path: Path) -> None:
    """Source: verl/trainer/ppo/v1/trainer_base.py, which does not read balance_batch."""
    translation = imported_script(["trainer.balance_batch=False"], tmp_path)
    assert "train.updates.shards" not in _flat(native(translation), "")
    assert any("random order" in line for line in translation.remarks)
    lines = ["data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    one = imported_script([*lines, "actor_rollout_ref.actor.ppo_epochs=2"], tmp_path)
    assert not any("mini-batches" in line for line in one.remarks)  # all samples in every update


def test_programs_beside_the_training_are_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "ray start --head\npython3 gsm8k.py --local_dir x\n" + SCRIPT + "trainer.nnodes=1\n"
    )
    text = report(translate_arguments("verl", [str(script)]))
    assert_mentions(text, "ray start", "gsm8k.py", "not imported")


def test_mini_batches_count_prompts_in_verl_and_samples_here(tmp_path: Path) -> None:
    lines = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    ]
    assert values(lines, tmp_path)["train.updates.samples_per_update"] == 512


def test_changes_of_the_command_line_follow_hydra(tmp_path: Path) -> None:
    lines = [
        "+actor_rollout_ref.rollout.min_p=0.1",
        "++trainer.logger=[console,tensorboard]",
        "trainer.n_gpus_per_node=4",
        "~trainer.n_gpus_per_node",
        "actor_rollout_ref.rollout.max_num_seqs='${data.max_response_length}'",
        "data.max_response_length=96",
    ]
    found = values(lines, tmp_path)
    assert found["rollout.sampling.min_p"] == 0.1
    assert found["log.trackers"] == ["tensorboard"]
    assert found["cluster.devices_per_node"] == 8  # the default
    assert found["rollout.engine.max_num_seqs"] == 96


def test_a_reference_to_a_key_that_is_not_set_has_verl_s_default(tmp_path: Path) -> None:
    line = "actor_rollout_ref.rollout.max_num_seqs='${data.max_response_length}'"
    assert values([line], tmp_path)["rollout.engine.max_num_seqs"] == 512


@pytest.mark.parametrize(
    "choice",
    [
        "model_engine=megatron",
        "--config-name=ppo_megatron_trainer.yaml",
        "actor@actor_rollout_ref.actor=megatron_actor",
        "actor_rollout_ref.actor.strategy=megatron",
    ],
)
def test_the_engine_decides_which_layout_is_read(choice: str, tmp_path: Path) -> None:
    lines = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
    ]
    with_fsdp = values(lines, tmp_path)
    assert (with_fsdp["train.parallel.cp"], with_fsdp.get("train.parallel.tp")) == (4, None)
    found = values([choice, *lines], tmp_path)
    assert (found["train.parallel.tp"], found["train.parallel.sp"]) == (2, True)
    assert found["train.parallel.cp"] == 1


@pytest.mark.parametrize(
    "lines",
    [
        ["reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.overlong_buffer_cfg"],
        ["reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg"],
        ["reward_model.reward_manager=dapo", "reward_model.overlong_buffer"],
    ],
)
def test_both_generations_of_reward_keys_are_read(lines: list[str], tmp_path: Path) -> None:
    manager, path = lines
    settings = [f"{path}.enable=True", f"{path}.len=128", f"{path}.penalty_factor=0.5"]
    found = values([manager, *settings], tmp_path)
    assert (found["reward.overlong.buffer"], found["reward.overlong.factor"]) == (128, 0.5)


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_reward_function_of_both_generations_is_a_source(section: str, tmp_path: Path) -> None:
    found = values([f"{section}.path=score.py", f"{section}.name=my_score"], tmp_path)
    assert found["reward.sources"] == [{"function": "score.py:my_score"}]


def test_the_importance_weights_of_v0_5_are_read(tmp_path: Path) -> None:
    found = values(["+actor_rollout_ref.actor.tis_imp_ratio_cap=2.0"], tmp_path)
    assert (found["algo.mismatch.weight"], found["algo.mismatch.upper"]) == ("token", 2.0)


def test_the_policy_trains_from_the_step_that_critic_warmup_names(tmp_path: Path) -> None:
    assert values(["trainer.critic_warmup=5"], tmp_path)["algo.value.warmup_steps"] == 4
    assert "algo.value.warmup_steps" not in values(["trainer.critic_warmup=1"], tmp_path)


REFUSED = {
    "algorithm.adv_estimator=gdpo": "algorithm.adv_estimator=gdpo: not supported",
    "actor_rollout_ref.actor.policy_loss.loss_mode=dro": "not supported: msrl has vanilla",
    "actor_rollout_ref.actor.loss_agg_mode=mean": "loss_agg_mode=mean",
    "actor_rollout_ref.rollout.multi_turn.enable=True": "environment.name: tools",
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent": "the agent loop tool_agent",
    "reward.reward_manager.name=batch": "reward.sources.url",
    "actor_rollout_ref.actor.optim.optimizer=Muon": "AdamW",
    "actor_rollout_ref.model.lora_adapter_path=adapters": "hf2hf --lora",
    "data.custom_cls.path=rows.py": "own-data.md",
    "data.video_key=clips": "training on video",
    "data.image_key=images": "critic reads text",
    "data.train_batch_sise=4": "unknown key of verl; did you mean 'train_batch_size'?",
    "actor_rollout_ref.actor.policy_losses.loss_mode=gspo": "unknown key of verl",
    "trainer.val_only=True": "msrl eval",
    "algorithm.use_pf_ppo=True": "PF-PPO",
    "distillation.enabled=True": "msrl train-distill",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("line", REFUSED)
def test_what_msrl_does_not_have_is_refused_by_name(line: str, tmp_path: Path) -> None:
    message = errors([line], tmp_path, approximate=True)
    assert_mentions(message, REFUSED[line])
    assert "run.sh" in message


DIFFERENT = [
    "actor_rollout_ref.rollout.name=sglang",
    "data.truncation=left",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.fsdp_config.dtype=float16",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
    "data.apply_chat_template_kwargs={enable_thinking: false}",
    "+actor_rollout_ref.model.override_config.max_position_embeddings=4096",
    "+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=4096",
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("line", DIFFERENT)
def test_what_changes_results_needs_approximate(line: str, tmp_path: Path) -> None:
    more = ["algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"]
    lines = [f'"{line}"', *more]
    assert_mentions(errors(lines, tmp_path), "--approximate", "results differ")
    assert not imported_script(lines, tmp_path, approximate=True).errors


def test_all_mistakes_of_a_script_are_reported_together(tmp_path: Path) -> None:
    lines = ["data.train_batch_sise=4", "trainer.val_only=True", "stray"]
    assert_mentions(errors(lines, tmp_path), "train_batch_sise", "val_only", "stray")


def test_a_condition_on_an_installed_package_is_that_of_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "probe.sh"
    script.write_text(
        "A=${A:-$(python3 -c 'import no_such_package' 2>/dev/null && echo 4 || echo 2)}\n"
        "B=$(python3 -c 'import json' && echo 3 || echo 5)\n" + SCRIPT + "trainer.nnodes=$A "
        "actor_rollout_ref.rollout.n=$B\n"
    )
    found = _flat(native(translate_arguments("verl", [str(script)])), "")
    assert (found["cluster.nodes"], found["rollout.samples_per_prompt"]) == (2, 3)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node=8 -m verl.trainer.main_ppo",
        "ray job submit --no-wait -- python3 -m verl.trainer.main_ppo",
        "python -m recipe.dapo.main_dapo",
        "uv run --frozen python3 -u verl/trainer/main_ppo.py",
    ],
)
def test_every_launcher_of_a_training_is_recognized(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{launcher} actor_rollout_ref.rollout.n=3 algorithm.adv_estimator=grpo\n")
    found = _flat(native(translate_arguments("verl", [str(script)])), "")
    assert found["rollout.samples_per_prompt"] == 3


def test_a_script_without_a_training_names_the_command_for_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_generation_server data.path=x\n")
    with pytest.raises(MsrlError, match="msrl generate"):
        translate_arguments("verl", [str(script)])


YAML = """\
defaults:
  - ppo_trainer
  - _self_
data: {train_files: [train.parquet], train_batch_size: 64}
actor_rollout_ref:
  model: {path: ~/models/qwen}
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    ppo_mini_batch_size: 64
  rollout:
    name: ???
    n: 4
    max_num_seqs: ${oc.select:actor_rollout_ref.rollout.n,${oc.select:data.seed,null}}
    response_length: ${oc.select:data.max_response_length,512}
algorithm: {adv_estimator: grpo}
custom_reward_function: {path: null, name: null}
"""


def test_a_yaml_file_with_defaults_and_references_is_read(tmp_path: Path) -> None:
    found = _flat(native(imported_file(YAML, tmp_path)), "")
    assert found["rollout.engine.max_num_seqs"] == 4
    assert found["train.updates.samples_per_update"] == 256
    assert found["model.path"] == str(Path("~/models/qwen").expanduser())


def test_a_script_changes_the_file_that_config_name_names(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(YAML)
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name=mine "
        "actor_rollout_ref.rollout.n=2\n"
    )
    found = _flat(native(translate_arguments("verl", [str(script)])), "")
    assert (found["rollout.samples_per_prompt"], found["rollout.prompts_per_step"]) == (2, 64)


def test_an_unset_folder_is_a_placeholder_and_an_unset_number_an_error(tmp_path: Path) -> None:
    lines = ["actor_rollout_ref.model.path=$NO_SUCH_FOLDER_9/qwen"]
    assert values(lines, tmp_path)["model.path"] == "<NO_SUCH_FOLDER_9>/qwen"
    message = errors(["actor_rollout_ref.rollout.n=$NO_SUCH_NUMBER_9"], tmp_path)
    assert_mentions(message, "$NO_SUCH_NUMBER_9 is not set")


def test_an_empty_required_path_is_a_placeholder(tmp_path: Path) -> None:
    found = values(["data.train_files=$ROWS", "actor_rollout_ref.model.path="], tmp_path)
    assert found["data.train"] == "<ROWS>"
    assert found["model.path"] == "<actor_rollout_ref.model.path>"


@pytest.mark.parametrize(
    ("value", "name"),
    [("grpo$NO_SUFFIX_9", "grpo"), ("grpo_$(now)", "grpo"), ("$(now)", "run"), ("`now`_a", "a")],
)
def test_a_name_that_is_known_in_part_is_kept_and_reported(
    value: str, name: str, tmp_path: Path
) -> None:
    translation = imported_script([f"trainer.experiment_name={value}"], tmp_path)
    assert native(translation)["run"]["name"] == name
    assert_mentions("\n".join(translation.remarks), "run.sh:8", f"trainer.experiment_name={name}")


def test_one_update_per_step_needs_no_replay_of_the_router(tmp_path: Path) -> None:
    mode = "actor_rollout_ref.actor.router_replay.mode=R2"
    assert values([mode], tmp_path)["train.router.replay"] == "trainer"
    single = [mode, "data.train_batch_size=256"]
    assert "train.router.replay" not in values(single, tmp_path)


def test_values_in_braces_need_no_blank_after_a_colon(tmp_path: Path) -> None:
    lines = ["'actor_rollout_ref.actor.optim={lr:2e-6,weight_decay:0.5}'"]
    found = values(lines, tmp_path)
    assert found["train.optimizer.lr"] == 2e-6
    assert found["train.optimizer.weight_decay"] == 0.5


def test_the_filter_compares_scores_before_the_penalty(tmp_path: Path) -> None:
    lines = [
        "data.train_files=data/dapo-math-17k.parquet",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=1536",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer={enable: true, len: 128, penalty_factor: 1.0}",
    ]
    found = values([f'"{line}"' for line in lines], tmp_path, approximate=True)
    assert found["rollout.filter.source"] == "math_dapo"
    assert (found["rollout.filter.max_refills"], found["rollout.filter.extra_prompts"]) == (9, 512)


def test_the_report_and_the_yaml_hold_no_secret(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("export WANDB_API_KEY=abcdef123456\n" + SCRIPT + "trainer.nnodes=1\n")
    translation = translate_arguments("verl", [str(script)])
    assert "abcdef123456" not in report(translation) + native_yaml(translation)


def test_each_row_of_the_table_belongs_to_a_section_that_is_read() -> None:
    from msrl.importers.table import load_table
    from msrl.importers.verl.sections import table_sections

    assert {section for section, _ in load_table("verl").rows} <= table_sections()


SFT = """\
torchrun --standalone --nnodes=2 --nproc_per_node=$1 -m verl.trainer.sft_trainer \\
    data.train_files=train.parquet data.val_files=test.parquet data.messages_key=turns \\
    data.train_batch_size=64 data.truncation=right optim.lr=1e-4 optim.lr_warmup_steps_ratio=0 \\
    engine=fsdp engine.ulysses_sequence_parallel_size=2 model.path=qwen model.lora_rank=8 \\
    trainer.test_freq=10 "${@:2}"
"""


def test_a_script_of_the_supervised_trainer_becomes_a_supervised_training(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(SFT)
    arguments = [str(script), "4", "trainer.total_epochs=3"]
    translation = translate_arguments("verl", arguments, approximate=True)
    found = _flat(native(translation), "")
    expected = {
        "data.train": "train.parquet",
        "data.eval": "test.parquet",
        "data.too_long": "truncate",
        "data.seq_length": 1024,
        "preprocess.map_keys.messages": "turns",
        "train.global_batch": 64,
        "train.max_tokens_per_micro_batch": 16384,
        "train.parallel.cp": 2,
        "train.optimizer.lr": 1e-4,
        "train.lora.rank": 8,
        "train.epochs": 3,
        "cluster.nodes": 2,
        "cluster.devices_per_node": 4,
        "eval.every_steps": 10,
    }
    assert {key: found.get(key) for key in expected} == expected
    validation = validate(translation)
    assert validation.commands == ("train-sft",) and not validation.errors


def test_an_engine_without_settings_here_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text("python -m verl.trainer.sft_trainer engine=automodel model.path=qwen\n")
    with pytest.raises(ManyErrors, match="the engine automodel"):
        translate_arguments("verl", [str(script)])


@pytest.mark.parametrize("text", ["[0.9,0.95]", "'[0.9, 0.95]'", "'(0.9, 0.95)'"])
def test_betas_are_a_list_or_the_text_of_one(text: str, tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.optim.betas"
    line = f'{key}="{text}"'
    assert values([line], tmp_path)["train.optimizer.betas"] == [0.9, 0.95]
    with pytest.raises(MsrlError, match=mentions("betas=high", "list")):
        values([f"{key}=high"], tmp_path)


def test_megatron_of_verl_reads_no_betas(tmp_path: Path) -> None:
    lines = ["actor_rollout_ref.actor.optim.betas=[0.8,0.95]", "model_engine=megatron"]
    assert values(lines, tmp_path)["train.optimizer.betas"] == [0.9, 0.999]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("actor_rollout_ref.model.path", "Qwen/Qwen2-Audio-7B-Instruct"),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-Omni-7B"),
        ("actor_rollout_ref.model.path", "meta-llama/Llama-3.2-11B-Vision-Instruct"),
        ("actor_rollout_ref.model.path", "deepseek-ai/deepseek-vl2"),
        ("actor_rollout_ref.model.path", "zai-org/GLM-4.1V-9B-Thinking"),
        ("actor_rollout_ref.model.path", "mistralai/Pixtral-12B-2409"),
        ("data.train_files", "/data/video/train.parquet"),
    ],
)
def test_names_of_models_and_data_tell_that_a_script_needs_sound_or_another_tower(
    key: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(name)) as caught:
        values([f"{key}={name}"], tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "trainer.project_name=verl_grpo_example_geo3k",
        "data.train_files=/provision/supervision/train.parquet",
        "data.train_files=/data/omni-math/train.parquet",
        "actor_rollout_ref.model.path=/provision/jovis/Qwen3-8B",
    ],
)
def test_names_that_only_look_like_images_are_text(line: str, tmp_path: Path) -> None:
    assert values([line], tmp_path)


def test_a_critic_has_the_betas_of_the_policy_which_megatron_does_not_read(tmp_path: Path) -> None:
    gae, other = "algorithm.adv_estimator=gae", "critic.optim.betas=[0.8,0.9]"
    assert values([gae, "critic.optim.betas=\"'[0.9, 0.999]'\""], tmp_path)
    assert values([gae, other, "model_engine=megatron"], tmp_path)
    with pytest.raises(MsrlError, match=mentions("critic.optim.betas", "policy")):
        values([gae, other], tmp_path)


def test_trackers_have_the_project_of_the_original(tmp_path: Path) -> None:
    names = "trainer.logger=[console,wandb,mlflow,clearml,trackio]"
    found = values([names, "trainer.project_name=math"], tmp_path)
    assert found["log.trackers"] == ["wandb", "mlflow", "clearml", "trackio"]
    for key in ("wandb.project", "mlflow.experiment", "clearml.project", "trackio.project"):
        assert found[f"log.options.{key}"] == "math"


_VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"


def test_arguments_of_vllm_follow_the_list_of_engine_options(tmp_path: Path) -> None:
    native_values = values([f"{_VLLM}.attention_backend=FLASH_ATTN"], tmp_path)
    assert native_values["rollout.engine.options.attention_backend"] == "FLASH_ATTN"
    text = errors([f"{_VLLM}.kv_cache_dtype=fp8", f"{_VLLM}.max_num_seqs=8"], tmp_path)
    assert_mentions(text, "kv_cache_dtype", "not tried", "rollout.engine.max_num_seqs")
