"""MindSpeed-RL files in train-grpo. Meanings of keys: its source code (04aa0845 and 05a90d77)."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config_inputs import make_data, make_model, skip_input_checks
from guides import guide
from msrl.cli.configuration import load_configuration as load
from msrl.config.loader import Resolved
from msrl.config.show import flow
from msrl.config.sources import plain, read
from msrl.errors import MsrlError
from msrl.importers.native_keys import refusal
from msrl.importers.systems import foreign
from msrl.importers.table import load_table
from msrl.importers.translation import KeyStatus, Translation
from msrl.plan.derived import derived_values
from support import ROOT, assert_each_mentions, assert_mentions, labelled, locate
from test_cli import msrl

EXAMPLES = ROOT / "examples" / "mindspeed"
PRESENT, FIRST = EXAMPLES / "grpo_qwen25_7b_A3.yaml", EXAMPLES / "grpo_r1_zero_qwen25_7b.yaml"
QWEN25_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the model config, data and checkpoint that both examples
    name.
    """
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "Qwen2.5-7B", **QWEN25_7B)
    make_model(tmp_path / "ckpt", **QWEN25_7B)
    for prefix in ("dataset/deepscaler/data", "dataset/data"):
        (tmp_path / prefix).parent.mkdir(parents=True, exist_ok=True)
        make_data(tmp_path / prefix)
    skip_input_checks(monkeypatch)
    return tmp_path


@functools.cache
def read_tree(file: Path) -> dict[str, Any]:
    return plain(read(file))


def write(file: Path, folder: Path, changes: dict[str, Any]) -> str:
    """Write an example with changed keys (`section.key`) and its model file; return the path."""
    tree = copy.deepcopy(read_tree(file))
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = tree
        for section in sections:
            target = target.setdefault(section, {})
        target.pop(key, None)
        if value is not ...:
            target[key] = value
    if not (folder / "model").exists():
        (folder / "model").symlink_to(EXAMPLES / "model")
    (folder / "changed.yaml").write_text("\n".join(_lines(tree)) + "\n", encoding="utf-8")
    return str(folder / "changed.yaml")


def _lines(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {flow(value)}"


def native(file: Path, folder: Path, **changes: Any) -> Resolved:
    return load(
        [write(file, folder, {key.replace("__", "."): value for key, value in changes.items()})]
    )


def translate(file: Path, folder: Path, changes: dict[str, Any]) -> Translation:
    translation = foreign(write(file, folder, changes))
    assert translation is not None
    return translation


def mistakes(file: Path, folder: Path, **changes: Any) -> list[str]:
    with pytest.raises(MsrlError) as caught:
        native(file, folder, **changes)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("file", [PRESENT, FIRST], ids=lambda file: file.stem)
def test_an_example_runs_unchanged_and_reports_every_key(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("train-grpo", "-c", str(file), "--dry-run") == 0
    captured = capsys.readouterr()
    assert "  ranks: 16\n" in captured.out
    assert_mentions(captured.err.splitlines()[0], file, "MindSpeed-RL", "grpo")
    keys = [
        line.split(":", 1)[0].strip()
        for line in file.read_text(encoding="utf-8").splitlines()
        if ":" in line and line[0] in " -"
    ]
    assert all(
        key.lstrip("- ") in captured.err for key in keys if key not in ("num_npus", "- model")
    )


def test_every_key_of_the_r1_zero_guide_example_is_reported(folder: Path):
    block = re.search(r"^```shell\n(defaults:.*?)^```", guide("mindspeed-rl-r1-zero"), re.S | re.M)
    assert block is not None
    text = re.sub(r" +<--.*", "", re.sub(r"^ *\.\.\.\n", "", block[1], flags=re.M))
    (folder / "guide.yaml").write_text(text, encoding="utf-8")
    translation = foreign(str(folder / "guide.yaml"))
    assert translation is not None and not translation.errors and not translation.refusals()
    keys = set(re.findall(r"^ +([a-z_]+):", text, re.M))
    assert (
        keys == {key_result.entry.key for key_result in translation.key_results} - {"defaults"}
        and len(keys) > 45
    )
    tree = plain(translation.complete_tree())
    assert (
        tree["train"]["updates"]["samples_per_update"] == 512
        and tree["rollout"]["prompts_per_step"] == 64
    )
    assert (
        tree["cluster"]["devices_per_node"] == 8
    )  # the reference shares these devices; the original uses 8 others


def test_an_example_is_found_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "configs").symlink_to(EXAMPLES)
    assert msrl("train-grpo", "--config-name", "grpo_r1_zero_qwen25_7b", "--dry-run") == 0
    assert "  samples per step: 512\n" in capsys.readouterr().out


def test_a_run_summarizes_the_translation_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from test_cli import record_calls

    calls = record_calls(monkeypatch, "train_grpo")
    assert msrl("train-grpo", "-c", str(PRESENT)) == 0
    assert len(calls) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert_mentions(line, PRESENT, "MindSpeed-RL", "grpo", "--dry-run")


def test_a_mini_batch_counts_prompts_now_and_samples_in_the_first_generation(folder: Path):
    present, first = load([str(PRESENT)]).config, load([str(FIRST)]).config
    assert (present.rollout.prompts_per_step, present.rollout.samples_per_prompt) == (32, 8)
    assert present.train.updates.samples_per_update == 32 * 8
    assert (first.rollout.prompts_per_step, first.train.updates.samples_per_update) == (64, 512)
    without_roles = native(
        FIRST,
        folder,
        ref_config=...,
        rl_config__colocate_actor_ref=...,
        rl_config__colocate_all_models=...,
    )
    assert (
        without_roles.config.train.updates.samples_per_update == 512
    )  # the value exceeds the 64 prompts


def test_defaults_depend_on_the_generation(folder: Path):
    def terms(resolved: Resolved) -> tuple[float, float, str]:
        algo = resolved.config.algo
        return algo.entropy_coef, algo.kl.loss.coef, algo.kl.loss.estimator

    gone: dict[str, Any] = {
        f"rl_config__{key}": ... for key in ("entropy_coeff", "init_kl_coef", "kl_penalty")
    }
    assert terms(native(PRESENT, folder, **gone)) == (0.0, 0.01, "k3")
    assert terms(native(FIRST, folder, **gone)) == (0.001, 0.01, "k1")
    sampling = native(
        PRESENT, folder, generate_config__sampling_config={"max_tokens": 2048}
    ).config.rollout.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.2,
        50,
        1.0,
        0.0,
    )


def test_the_plan_follows_from_the_files_devices(folder: Path):
    rows = derived_values(load([str(FIRST)]).config, "train-grpo")
    values = (
        rows["data parallel"],
        labelled(rows, "samples", "optimizer update"),
        labelled(rows, "micro-batches", "rank"),
    )
    assert values == (2, 512, 256)
    assert load([str(FIRST)]).config.rollout.engine.dp == 16 // 2
    wider = native(FIRST, folder, generate_config__infer_tensor_parallel_size=4)
    assert wider.config.rollout.engine.dp == 4
    assert_mentions(
        mistakes(FIRST, folder, generate_config__infer_tensor_parallel_size=3)[0],
        "actor_resource.num_npus=16",
    )


def test_hyphens_and_underscores_are_the_same(folder: Path):
    text = PRESENT.read_text(encoding="utf-8")
    (folder / "hyphens.yaml").write_text(
        text.replace("clip_ratio: 0.2", "clip-ratio: 0.3").replace("train_iters", "train-iters"),
        encoding="utf-8",
    )
    config = load([str(folder / "hyphens.yaml")]).config
    assert (config.algo.clip.low, config.train.steps) == (0.3, 1000)


@pytest.mark.parametrize(
    ("section", "key", "fragments"),
    [
        ("rl_config", "clip_ratoi", ("'clip_ratio'",)),
        ("megatron_training", "global_batch_sise", ("'global_batch_size'",)),
        ("actor_config", "lr_decay_styel", ("'lr_decay_style'",)),
        ("generate_config", "max_num_seq", ("'max_num_seqs'",)),
        ("generate_config", "temperature", ("sampling_config",)),
        ("generate_config", "enable_chunked_prefill", ("'chunked_prefill_for_mla'",)),
    ],
)
def test_a_misspelt_key_is_named_with_its_line_and_the_nearest(
    section: str, key: str, fragments: tuple[str, ...], folder: Path
):
    path = write(PRESENT, folder, {f"{section}.{key}": 1})
    number = 1 + next(
        i
        for i, text in enumerate(Path(path).read_text().splitlines())
        if text.strip() == f"{key}: 1"
    )
    with pytest.raises(MsrlError) as caught:
        load([path])
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{path}:{number}: {section}.{key}=1: ")
    assert_mentions(message, "key", "MindSpeed-RL", *fragments)


def test_all_errors_of_a_file_are_reported_together(folder: Path):
    lines = mistakes(
        PRESENT,
        folder,
        rl_config__kl_ctrl_type="low_var_kl",
        rl_config__verifier_weight=[1.0, 2.0],
        actor_config__hidden_dropout=0.1,
    )
    assert_each_mentions(
        lines,
        ("kl_ctrl_type=low_var_kl", "fixed", "adaptive"),
        ("verifier_weight", 1, 2),
        ("hidden_dropout=0.1", "dropout", "--approximate"),
    )


def test_step_counts_numbers_as_the_original_does(folder: Path):
    names = {"rl_config__verifier_function": ["step"], "rl_config__verifier_weight": [1.0]}
    (source,) = native(FIRST, folder, **names).config.reward.sources
    assert (source.verifier, source.options) == ("step", {"numbers": "response"})


@pytest.mark.parametrize("weights", [["1.0"], [None], [True]])
def test_weights_of_verifiers_are_numbers(weights: list[object], folder: Path):
    (line,) = mistakes(PRESENT, folder, rl_config__verifier_weight=weights)
    assert_mentions(line, "verifier_weight", "numbers", "verifier_function")


@pytest.mark.parametrize(
    "key", ["rl_config__rule_reward", "actor_config__finetune", "actor_config__no_load_optim"]
)
def test_a_quoted_switch_is_refused(key: str, folder: Path):
    (line,) = mistakes(PRESENT, folder, **{key: "false"})
    assert_mentions(line, key.split("__")[1], "true or false", "quotes")


def test_keys_without_a_default_in_the_original_are_required(folder: Path):
    path = folder / "short.yaml"
    path.write_text(
        re.sub(
            r"^  (lr|global_batch_size):.*\n", "", PRESENT.read_text(encoding="utf-8"), flags=re.M
        ),
        encoding="utf-8",
    )
    with pytest.raises(MsrlError) as caught:
        load([str(path)])
    lines = str(caught.value).splitlines()
    for key, keyword in (("lr", "learning rate"), ("global_batch_size", "rows")):
        (line,) = [line for line in lines if f": {key}: " in line]
        assert_mentions(line, "missing", keyword)


def test_unsupported_keys_that_change_results_are_refused_by_both_names(folder: Path):
    (line,) = mistakes(PRESENT, folder, rl_config__partial_rollout_max_split=2)
    assert_mentions(line, "partial_rollout_max_split", "rollout.async.partial")
    (line,) = mistakes(PRESENT, folder, rl_config__multi_turn_enable=True)
    assert_mentions(line, "tool_config_path", "missing")
    assert native(
        PRESENT, folder, rl_config__partial_rollout_max_split=1, rl_config__multi_turn_enable=False
    )


def test_model_properties_must_equal_the_model_config(folder: Path):
    (folder / "Qwen2.5-7B" / "config.json").write_text(
        json.dumps({**json.loads((folder / "ckpt" / "config.json").read_text())}), encoding="utf-8"
    )
    (line,) = mistakes(PRESENT, folder, actor_config__num_layers=27)
    assert_mentions(line, "num_layers=27", "config.json", 28)


def test_a_run_resumes_under_the_conditions_of_megatron(folder: Path):
    start = load([str(PRESENT)]).config.checkpoint
    assert (start.load, start.save, start.resume) == ("./ckpt", "./saved", "none")
    resumed = native(
        PRESENT,
        folder,
        actor_config__finetune=False,
        actor_config__no_load_optim=False,
        actor_config__no_load_rng=False,
    )
    assert (resumed.config.checkpoint.load, resumed.config.checkpoint.resume) == (None, "./ckpt")
    for same in ("./ckpt", "./ckpt/"):
        assert native(PRESENT, folder, actor_config__save=same).config.checkpoint.save is None
    (line,) = mistakes(
        PRESENT, folder, actor_config__finetune=False, actor_config__no_load_optim=False
    )
    assert_mentions(line, "no_load_rng=true", "random")


def test_a_mindspeed_checkpoint_without_a_config_uses_that_of_the_model(folder: Path):
    from msrl.plan.run_plan import resolve

    config = load([str(PRESENT)]).config
    model = resolve(config, "train-grpo").model
    assert (model.weights, model.hf_dir) == (folder / "ckpt", folder / "ckpt")
    (folder / "ckpt" / "config.json").unlink()
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    model = resolve(config, "train-grpo").model
    assert (model.weights, model.hf_dir) == (folder / "ckpt", folder / "Qwen2.5-7B")
    assert load([str(PRESENT)], command="train-grpo")


def test_the_reference_starts_from_the_actors_weights_or_its_own(folder: Path):
    assert load([str(FIRST)]).config.cluster.roles.reference.load is None
    other = native(FIRST, folder, ref_config__load="./other").config
    assert other.cluster.roles.reference.load == "./other"
    integrated = {"rl_config.integrated_mode_config": {"ref_model_load_path": "./first"}}
    config = native(PRESENT, folder, **integrated).config
    assert config.cluster.roles.reference.load == "./first"


def test_without_an_integrated_worker_models_have_separate_devices(folder: Path):
    roles = load([str(FIRST)]).config.cluster.roles
    assert (roles.reference.devices, roles.reference.micro_batch) == (8, 8)
    assert (roles.reference.parallel.tp, roles.reference.parallel.pp) == (2, 2)
    assert roles.reward.devices is None  # verifiers score
    model = {
        "rl_config.use_integrated_worker": False,
        "rl_config.rule_reward": False,
        "rl_config.reward_resource": {"num_npus": 4},
        "reward_config.load": "./rm",
        "reward_config.tensor_model_parallel_size": 4,
        "reward_config.pipeline_model_parallel_size": 1,
    }
    roles = native(FIRST, folder, **model).config.cluster.roles
    assert (roles.reward.devices, roles.reward.parallel.tp, roles.reward.parallel.pp) == (4, 4, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"rl_config.use_integrated_worker": True},
        {"rl_config.colocate_actor_ref": True},
        {"rl_config.colocate_all_models": True},
        {"rl_config.init_kl_coef": 0.0},
    ],
)
def test_a_reference_that_shares_devices_or_is_not_used_has_none(
    change: dict[str, Any], folder: Path
):
    roles = native(FIRST, folder, **change).config.cluster.roles
    assert roles.reference.devices is None and roles.reference.parallel.tp is None


def test_a_reward_model_scores_on_the_training_ranks_if_rule_reward_is_false(folder: Path):
    (source,) = native(
        PRESENT, folder, **{"rl_config.rule_reward": False, "reward_config.load": "./rm"}
    ).config.reward.sources
    assert (source.model, source.engine, source.verifier) == ("./rm", "megatron", None)
    (line,) = mistakes(PRESENT, folder, **{"rl_config.rule_reward": False})
    assert_mentions(line, "rule_reward=false", "reward_config.load")


def test_dapo_reads_its_own_keys_and_has_no_kl(folder: Path):
    dapo = {
        "megatron_training__stage": "ray_dapo",
        "rl_config__clip_higher_enable": True,
        "rl_config__clip_ratio_low": 0.2,
    }
    algo = native(PRESENT, folder, **dapo, rl_config__clip_ratio_high=0.28).config.algo
    assert (algo.clip.low, algo.clip.high, algo.kl.loss.coef) == (0.2, 0.28, 0.0)
    unset = native(PRESENT, folder, **{**dapo, "rl_config__clip_ratio_low": ...}).config.algo
    assert (unset.clip.low, unset.clip.high) == (0.1, 0.1)
    grpo = native(PRESENT, folder, **{**dapo, "megatron_training__stage": "ray_grpo"}).config.algo
    assert (grpo.clip.low, grpo.kl.loss.coef) == (0.2, 0.001)
    overlong = {
        "rl_config.overlong_buffer_enable": True,
        "rl_config.overlong_buffer": 512,
        "rl_config.rollout_max_tokens": 1024,
    }
    translation = translate(PRESENT, folder, {"megatron_training.stage": "ray_dapo", **overlong})
    assert_each_mentions(
        translation.errors, ("rl_config.rollout_max_tokens=1024", "sampling_config.max_tokens=2048")
    )
    assert plain(translation.complete_tree())["reward"]["overlong"] == {
        "buffer": 512,
        "factor": 1.0,
    }


def test_ppo_translates_its_critic(folder: Path):
    translation = translate(
        PRESENT,
        folder,
        {
            "megatron_training.stage": "ray_ppo",
            "rl_config.adv_estimator": "gae",
            "rl_config.cliprange_value": 0.5,
        },
    )
    tree = plain(translation.complete_tree())
    assert (
        translation.algorithm == "ppo"
        and tree["algo"]["advantage"]["estimator"] == "gae"
        and tree["algo"]["value"]["clip"] == 0.5
    )
    assert "kl" not in tree["algo"]


PPO = {"megatron_training__stage": "ray_ppo", "rl_config__adv_estimator": "gae"}


def test_ppo_of_mindspeed_rl_trains_a_critic_with_its_settings(folder: Path):
    config = native(
        PRESENT,
        folder,
        **PPO,
        critic_config={
            "lr": 5.0e-6,
            "min_lr": 1e-7,
            "lr_decay_style": "cosine",
            "load": "Qwen2.5-7B",
        },
    ).config
    assert (
        config.algo.advantage.lam == 0.95
        and config.algo.advantage.whiten
        and config.algo.value.clip == 0.5
    )
    critic = config.cluster.roles.critic
    assert (
        critic.optimizer.lr,
        critic.optimizer.min_lr,
        critic.optimizer.schedule,
        critic.load,
    ) == (5e-6, 1e-7, "cosine", "Qwen2.5-7B")
    same = {"clip_grad": 1.0, "adam_beta1": 0.9, "micro_batch_size": 1, "finetune": True}
    assert (
        native(PRESENT, folder, **PPO, critic_config=same).config
        == native(PRESENT, folder, **PPO).config
    )
    (line,) = mistakes(PRESENT, folder, **PPO, critic_config={"lr": 5.0e-6, "clip_grad": 0.5})
    assert_mentions(line, "critic_config.clip_grad=0.5", "version", "grad_clip")
    (line,) = mistakes(PRESENT, folder, **PPO, critic_config={"micro_batch_size": 2})
    assert_mentions(line, "critic_config.micro_batch_size=2", "policy", "--approximate")
    assert config.algo.value.aggregate == config.algo.aggregate.mode == "seq-mean-token-mean"
    own = native(
        PRESENT,
        folder,
        **PPO,
        rl_config__lam=0.9,
        rl_config__cliprange_value=0.1,
        rl_config__gamma=0.99,
    ).config.algo
    assert (own.advantage.lam, own.value.clip, own.advantage.gamma) == (0.9, 0.1, 0.99)


def test_a_separate_critic_that_averages_by_other_micro_batches_is_reported(folder: Path):
    separate = {
        "rl_config__use_integrated_worker": False,
        "rl_config__colocate_all_models": False,
        "rl_config__critic_resource": {"num_npus": 8},
    }
    grouped = {
        "actor_config__micro_batch_size": 2,
        "rl_config__shuffle_mini_batch": False,
        "critic_config": {"micro_batch_size": 2},
    }
    translation = translate(PRESENT, folder, _dotted_keys({**PPO, **grouped}))
    tree = plain(translation.complete_tree())["algo"]
    assert tree["value"]["aggregate"] == tree["aggregate"]["mode"] == "micro-batch-mean"
    assert not [line for line in translation.differences if "critic" in line]
    translation = translate(PRESENT, folder, _dotted_keys({**PPO, **grouped, **separate}))
    (line,) = [line for line in translation.differences if "critic" in line]
    assert_mentions(line, "critic_resource", "value loss", "--approximate")


def _dotted_keys(changes: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in changes.items()}


def test_critic_keys_have_no_effect_without_gae(folder: Path):
    keys = {"critic_config": {"lr": 5e-6}, "rl_config.lam": 0.9, "rl_config.cliprange_value": 0.1}
    for stage in ("ray_grpo", "ray_ppo"):
        translation = translate(PRESENT, folder, {"megatron_training.stage": stage, **keys})
        dead = {
            key_result.entry.path
            for key_result in translation.key_results
            if key_result.status is KeyStatus.DEAD
        }
        assert {
            "critic_config.lr",
            "rl_config.lam",
            "rl_config.cliprange_value",
        } <= dead and not translation.refusals()


def test_a_token_budget_replaces_the_size_of_forward_micro_batches(folder: Path) -> None:
    forward = {"rl_config.actor_forward_micro_batch_size": 4}
    assert native(PRESENT, folder, **forward).config.train.forward_micro_batch == 4
    budget = {**forward, "rl_config.use_dynamic_bsz": True}
    translation = translate(PRESENT, folder, budget)
    statuses = {result.entry.path: result.status for result in translation.key_results}
    assert statuses["rl_config.actor_forward_micro_batch_size"] is KeyStatus.DEAD
    assert "forward_micro_batch" not in plain(translation.tree)["train"]


TOOL = locate("code_tool.yaml")
MULTI_TURN = {"rl_config.multi_turn_enable": True, "rl_config.tool_config_path": str(TOOL)}
DAPO = {"megatron_training.stage": "ray_dapo"}
SEPARATE = {"rl_config.use_integrated_worker": False}
FILTERED = {
    **DAPO, "rl_config.filter_groups_enable": True, "rl_config.filter_groups_metric": "acc",
    "rl_config.verifier_function": ["acc"],
    "rl_config.verifier_weight": [1.0], "rl_config.filter_groups_train_batch_size": 32,
    "megatron_training.global_batch_size": 32,
}  # fmt: skip
# For each key that has a native one: what to change besides, and another value than the example's.
EXPERTS = {"megatron_training.num_experts": 8}
OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "megatron.data_path": ({}, "dataset/data"), "megatron.tokenizer_name_or_path": ({}, "ckpt"),
    "megatron.prompt_type": ({}, "qwen_r1"),
    "megatron.no_shuffle": ({}, True), "megatron.global_batch_size": ({}, 64),
    "megatron.micro_batch_size": ({}, 2),
    "megatron.moe_aux_loss_coeff": (EXPERTS, 0.1),
    "megatron.moe_router_load_balancing_type": (EXPERTS, "seq_aux_loss"),
    "megatron.seq_aux": (EXPERTS, True),
    "megatron.moe_router_enable_expert_bias": (EXPERTS, True),
    "megatron.moe_router_bias_update_rate": (
        {**EXPERTS, "megatron_training.moe_router_enable_expert_bias": True}, 0.1
    ),
    "megatron.train_iters": ({}, 7), "megatron.seed": ({}, 7), "megatron.load": ({}, "Qwen2.5-7B"),
    "megatron.save": ({}, "elsewhere"),
    "megatron.save_interval": ({}, 7),
    "megatron.finetune": ({"actor_config.no_load_optim": False, "actor_config.no_load_rng": False},
        False),
    "megatron.no_load_optim": ({"actor_config.finetune": False, "actor_config.no_load_rng": False},
        False),
    "megatron.lr": ({}, 0.1), "megatron.lr_decay_style": ({}, "cosine"),
    "megatron.min_lr": ({}, 1.0e-7),
    "megatron.lr_warmup_fraction": ({}, 0.1), "megatron.weight_decay": ({}, 0.2),
    "megatron.clip_grad": ({}, 0),
    "megatron.adam_beta1": ({}, 0.8), "megatron.adam_beta2": ({}, 0.9),
    "megatron.tensor_model_parallel_size": ({}, 2),
    "megatron.pipeline_model_parallel_size": ({}, 2), "megatron.sequence_parallel": ({}, False),
    "megatron.bf16": ({"generate_config.dtype": ...}, False),
    "rl_config.n_samples_per_prompt": ({}, 4), "rl_config.mini_batch_size": ({}, 16),
    "rl_config.epochs": ({}, 2),
    "rl_config.shuffle_mini_batch": ({}, True),
    "rl_config.shuffle_minibatch": ({"rl_config.shuffle_mini_batch": ...}, True),
    "rl_config.actor_forward_micro_batch_size": ({}, 4), "rl_config.use_dynamic_bsz": ({}, True),
    "rl_config.max_packing_token_size": ({"rl_config.use_dynamic_bsz": True}, 9000),
    "rl_config.update_dynamic_max_batch_size": ({"rl_config.use_dynamic_bsz": True}, 2),
    "rl_config.update_max_packing_token_size": ({"rl_config.use_dynamic_bsz": True}, 9000),
    "rl_config.max_prompt_length": ({}, 1024), "rl_config.adv_estimator": ({}, "rloo"),
    "rl_config.clip_ratio": ({}, 0.1),
    "rl_config.clip_higher_enable": ({"megatron_training.stage": "ray_dapo"}, True),
    "rl_config.clip_ratio_low": ({"megatron_training.stage": "ray_dapo",
        "rl_config.clip_higher_enable": True}, 0.3),
    "rl_config.clip_ratio_high": ({"megatron_training.stage": "ray_dapo",
        "rl_config.clip_higher_enable": True}, 0.3),
    "megatron.use_deter_comp": ({}, True), "megatron.npu_deterministic": ({}, True),
    "rl_config.token_level_loss": (
        {"megatron_training.stage": "ray_dapo", "actor_config.micro_batch_size": 4},
        False,
    ),
    "rl_config.entropy_coeff": ({}, 0.1), "rl_config.kl_penalty": ({}, "mse"),
    "rl_config.init_kl_coef": ({}, 0.1),
    "rl_config.verifier_function": ({}, ["acc"]), "rl_config.verifier_weight": ({}, [0.5]),
    "rl_config.actor_resource": ({}, {"num_npus": 8}), "rl_config.hccl_buffersize": ({}, 512),
    "rl_config.runtime_env_path": ({}, str(EXAMPLES / "envs" / "runtime_env.yaml")),
    "rl_config.wandb_project": ({"rl_config.use_wandb": True}, "math"),
    "rl_config.wandb_save_dir": ({"rl_config.use_wandb": True}, "logs"),
    "rl_config.swanlab_project": ({"rl_config.use_swanlab": True}, "math"),
    "rl_config.swanlab_save_dir": ({"rl_config.use_swanlab": True}, "logs"),
    "rl_config.swanlab_exp_name": ({"rl_config.use_swanlab": True}, "first"),
    "rl_config.swanlab_mode": ({"rl_config.use_swanlab": True}, "cloud"),
    "rl_config.use_tensorboard": ({}, False), "rl_config.wandb_exp_name": ({}, "named"),
    "generate_config.infer_tensor_parallel_size": ({}, 2),
    "generate_config.data_parallel_size": ({}, 2), "generate_config.max_num_seqs": ({}, 7),
    "generate_config.max_num_batched_tokens": ({}, 4096),
    "generate_config.max_model_len": ({}, 8192),
    "generate_config.gpu_memory_utilization": ({}, 0.7),
    "generate_config.enable_prefix_caching": ({}, False),
    "generate_config.enforce_eager": ({}, True),
    "sampling_config.max_tokens": ({}, 1024), "sampling_config.temperature": ({}, 0.7),
    "sampling_config.top_p": ({}, 0.9), "sampling_config.top_k": ({}, 40),
    "sampling_config.min_p": ({}, 0.1), "sampling_config.seed": ({}, 7),
    "sampling_config.stop": ({}, ["END"]),
    # Keys that one algorithm reads, and keys that are or were unsupported: `later` keys count too.
    "rl_config.gamma": ({"megatron_training.stage": "ray_ppo"}, 0.9),
    **{key: ({"megatron_training.stage": "ray_ppo", "rl_config.adv_estimator": "gae"},
        0.2) for key in ("rl_config.lam", "rl_config.cliprange_value")},
    "rl_config.use_kl_in_reward": ({"megatron_training.stage": "ray_ppo"}, True),
    "rl_config.overlong_buffer_enable": ({**DAPO, "rl_config.overlong_buffer": 512}, True),
    "rl_config.overlong_buffer": ({**DAPO, "rl_config.overlong_buffer_enable": True}, 512),
    "rl_config.overlong_buffer_penalty_factor": ({**DAPO, "rl_config.overlong_buffer_enable": True,
        "rl_config.overlong_buffer": 512}, 0.5),
    "rl_config.filter_groups_enable": ({**FILTERED, "rl_config.filter_groups_enable": False}, True),
    "rl_config.filter_groups_max_batches": (FILTERED, 3),
    "rl_config.filter_groups_metric": ({**FILTERED,
        "rl_config.verifier_function": ["acc", "format"], "rl_config.verifier_weight": [1.0, 1.0]},
    "format"),
    "rl_config.partial_rollout_max_split": ({}, 2),
    "rl_config.integrated_mode_config": ({}, {"ref_model_load_path": "x"}),
    "rl_config.multi_turn_enable": ({"rl_config.tool_config_path": str(TOOL)}, True),
    "rl_config.max_tool_calls": (MULTI_TURN, 3), "rl_config.max_parallel_calls": (MULTI_TURN, 2),
    "rl_config.max_total_response_length": (MULTI_TURN, 1000),
    "rl_config.max_tool_response_length": (MULTI_TURN, 100),
    "rl_config.tool_parser_format": (MULTI_TURN, "hermes"),
    "rl_config.is_multimodal": ({}, True),
    "megatron.split": ({}, "90,5,5"), "megatron.vocab_extra_ids": ({}, 2),
    "megatron.optimizer": ({}, "sgd"),
    "megatron.num_layers_per_virtual_pipeline_stage": ({}, 2),
    "megatron.num_layer_list": ({}, "13,15"),
    "megatron.noop_layers": (
        {"actor_config.num_layers": 30, "megatron_training.noop_layers": "0,29"}, "1,29"),
    "megatron.expert_model_parallel_size": ({}, 2), "megatron.context_parallel_size": ({}, 2),
    "megatron.context_parallel_algo": ({}, "megatron_cp_algo"),
    "megatron.recompute_granularity": ({"megatron_training.recompute-granularity": ...},
        "selective"),
    "megatron.recompute_method": ({"megatron_training.recompute-method": ...}, "block"),
    "megatron.recompute_num_layers": ({"megatron_training.recompute-num-layers": ...}, 2),
    "megatron.lora_target_modules": ({}, ["linear_qkv"]),
    "megatron.lora_r": ({"actor_config.lora_target_modules": ["linear_qkv"]}, 4),
    "megatron.lora_alpha": ({"actor_config.lora_target_modules": ["linear_qkv"]}, 4),
    "generate_config.infer_pipeline_parallel_size": ({}, 2),
    "generate_config.infer_expert_parallel_size": (
        {"generate_config.infer_tensor_parallel_size": 2}, 2,
    ),
    "rl_config.reference_resource": (SEPARATE, {"num_npus": 8}),
    "rl_config.critic_resource": (
        {**SEPARATE, "megatron_training.stage": "ray_ppo", "rl_config.adv_estimator": "gae"},
        {"num_npus": 8},
    ),
    "rl_config.reward_resource": (
        {**SEPARATE, "rl_config.rule_reward": False, "reward_config.load": "rm"},
        {"num_npus": 8},
    ),
    "generate_config.offload_train_optimizer": ({}, False),
    "generate_config.offload_train_grad": ({}, False),
    "generate_config.offload_train_param": ({}, False),
}  # fmt: skip
ELSEWHERE = {
    "profiler",
    "runtime_env",
    "resource",
    "ref_config",
    "reward_config",
    "critic_config",
}  # tested above or below as complete files
REPORTED_ONLY = {
    "rl_config.tool_config_path",  # tested in test_imports_environments.py
    "rl_config.filter_groups_train_batch_size",
    "megatron.no_load_rng",
    "generate_config.dtype",
    "rl_config.rule_reward",
    "rl_config.use_wandb",
    "rl_config.use_swanlab",
}


def file_key(key: str) -> str:
    section, name = key.split(".")
    if section == "megatron":
        tree = read_tree(PRESENT)
        return (
            f"actor_config.{name}" if name in tree["actor_config"] else f"megatron_training.{name}"
        )
    return f"generate_config.{key}" if section == "sampling_config" else key


def keys_that_take_effect() -> list[str]:
    rows = [
        row
        for row in load_table("mindspeed_rl").rows.values()
        if row.to and row.section not in ELSEWHERE
    ]
    return sorted({f"{row.section}.{row.key}" for row in rows} - REPORTED_ONLY)


@pytest.mark.sample(20)
@pytest.mark.parametrize("key", keys_that_take_effect())
def test_changing_a_key_changes_its_native_key(key: str, folder: Path):
    besides, value = OTHERS.get(key, ({}, None))
    row = load_table("mindspeed_rl").row(*key.split("."))
    assert row is not None and key in OTHERS, (
        f"{key} has a native key: say another value of it in OTHERS"
    )
    before = translate(PRESENT, folder, besides)
    after = translate(PRESENT, folder, {**besides, file_key(key): value})
    assert not before.errors and not after.errors, (before.errors, after.errors)

    def values(translation: Translation) -> list[object]:
        tree = plain(translation.complete_tree())
        return [_at(tree, native_key) for native_key in (*row.to, "checkpoint.load")]

    if row.neutral[1] and refusal(row.to[0], value):
        return  # unsupported, but reported as not changing results
    assert values(before) != values(after)
    assert not any(
        key_result.status in (KeyStatus.DEAD, KeyStatus.SAME)
        and key_result.entry.key == row.key
        and key_result.entry.section == row.section
        for key_result in after.key_results
    )


def _at(tree: Any, key: str) -> object:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def test_a_key_of_the_environment_reaches_the_workers(folder: Path):
    (folder / "envs").mkdir()
    (folder / "envs" / "runtime_env.yaml").write_text(
        "env_vars: {HCCL_CONNECT_TIMEOUT: '7', MY_OWN: x, VLLM_USE_V1: '1'}\n", encoding="utf-8"
    )
    assert native(PRESENT, folder).config.cluster.env == {
        "HCCL_CONNECT_TIMEOUT": "7",
        "MY_OWN": "x",
    }


@pytest.mark.parametrize("is_saved", [True, False])
def test_no_save_keys_have_no_effect_and_are_supported(folder: Path, is_saved: bool):
    translation = translate(
        PRESENT,
        folder,
        {"actor_config.no_save_optim": is_saved, "actor_config.no_save_rng": is_saved},
    )
    lines = [
        str(key_result)
        for key_result in translation.key_results
        if key_result.entry.key.startswith("no_save_")
    ]
    assert len(lines) == 2 and all("optimizer" in line for line in lines), lines
    assert not any("version" in line for line in lines)


def test_wandb_overrides_tensorboard(folder: Path):
    resolved = native(PRESENT, folder, rl_config__use_wandb=True)
    if refusal("log.trackers", ["wandb"]):
        assert any(
            "metrics.jsonl" in str(key_result)
            for key_result in resolved.translations[0].key_results
        )
    else:
        assert resolved.config.log.trackers == ("wandb",)


def test_the_auxiliary_loss_of_experts_has_the_default_of_the_original(folder: Path):
    def router(changes: dict[str, Any]) -> Any:
        return plain(translate(PRESENT, folder, changes).tree)["train"].get("router")

    assert router({}) is None
    assert router(EXPERTS) == {"aux_loss_coef": 0.001, "aux_loss_over": "micro_batch"}
    assert router({**EXPERTS, "megatron_training.moe_router_load_balancing_type": "none"}) is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rope_scaling_type", "yarn", "none"),
        ("qk_layernorm", True, "False"),
        ("add_qkv_bias", False, "True"),
    ],
)
def test_a_property_of_the_model_that_differs_from_its_config_is_refused(
    key: str, value: object, expected: str, folder: Path
) -> None:
    file = write(PRESENT, folder, {f"megatron_training.{key}": value})
    with pytest.raises(MsrlError) as error:
        load([file])
    assert_mentions(error.value, f"{key}=", "config.json", expected)
