"""Devices, layouts and weights of roles: checks, placement, memory and settings of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import make_configs, make_mcore, make_model, make_working_folder
from mixture_families import QWEN3_MOE
from msrl.checks.validate import find_errors
from msrl.cli.configuration import load_configuration as load
from msrl.cluster.placement import NodePlan, Role, plan
from msrl.memory.estimate import training_memory, with_engine
from msrl.plan.derived import derived_values, num_engines, ranks
from msrl.plan.run_plan import RunPlan, resolve
from msrl.trainer.settings import Layout
from msrl.workflows.training.settings import (
    loaded_models,
    rank_settings,
    separate_rank_settings,
)
from support import assert_mentions

KL = "algo.kl.loss.coef=0.1"
JUDGE = "reward.sources=[{verifier: acc}, {model: judge, engine: megatron, name: judge}]"
MOE_SCORES = {"architectures": ["Qwen3MoeForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "judge", **SCORES)
    return make_working_folder(tmp_path)


def resolved_plan(*sets: str) -> RunPlan:
    return resolve(load(["grpo.yaml"], [*sets]).config, "train-grpo")


def mistakes(key: str, *sets: str) -> list[str]:
    """Return the errors that name a key."""
    resolved = load(["grpo.yaml"], [*sets])
    lines = find_errors(resolved, resolve(resolved.config, "train-grpo"))
    return [line for line in lines if key in line]


# --- engines on every device


@pytest.mark.parametrize(
    ("sets", "count"),
    [
        ((), 1),
        (("cluster.devices_per_node=4",), 4),
        (("cluster.devices_per_node=4", "rollout.engine.tp=2"), 2),
        (("cluster.devices_per_node=4", "rollout.engine.dp=1"), 1),
        (("cluster.devices_per_node=2", "cluster.roles.rollout.devices=3"), 3),
        (("cluster.roles.rollout.devices=[1, 2]", "rollout.engine.tp=2"), 1),
    ],
)
def test_by_default_engines_are_on_every_device_that_generates(
    sets: tuple[str, ...], count: int, folder: Path
) -> None:
    assert num_engines(load(["grpo.yaml"], [*sets]).config) == count
    assert resolved_plan(*sets).num_engines == count


def test_the_plan_names_devices_without_an_engine(folder: Path) -> None:
    sets = ("cluster.devices_per_node=4", "rollout.engine.dp=2")
    rows = derived_values(load(["grpo.yaml"], [*sets]).config, "train-grpo")
    assert_mentions(rows["idle devices"], "2", "3", "rollout.engine.dp")
    rows = derived_values(load(["grpo.yaml"], ["cluster.devices_per_node=4"]).config, "train-grpo")
    assert "idle devices" not in rows


def test_the_plan_names_devices_of_engines_that_are_idle_during_training(folder: Path) -> None:
    rows = derived_values(
        load(["grpo.yaml"], ["cluster.roles.rollout.devices=2"]).config, "train-grpo"
    )
    assert_mentions(rows["devices of engines"], "2", "idle")


def test_training_ranks_have_no_engine_if_engines_have_separate_devices(folder: Path) -> None:
    config = load(["grpo.yaml"], ["cluster.roles.rollout.devices=2"]).config
    assert [rank.engine for rank in ranks(config, "train-grpo")] == [None]


# --- placement


def test_separate_roles_are_on_nodes_without_other_roles() -> None:
    roles = [
        Role("actor", 4),
        Role("rollout", 3, 2, is_separate=True),
        Role("reference", 2, is_separate=True),
    ]
    placement = plan(roles, 4, resource="device")
    assert placement.bundles == (NodePlan(0, 4), NodePlan(1, 4), NodePlan(2, 2), NodePlan(3, 2))
    assert placement.role("rollout").nodes == (1, 1, 2)
    assert placement.role("rollout").bundle_indices == ((0, 1), (2, 3), (0, 1))
    assert placement.role("reference").nodes == (3, 3)
    assert {assignment.share for assignment in placement.assignments} == {1.0}
    assert placement.num_devices == 12


def test_a_separate_engine_may_have_more_devices_than_a_node_of_training() -> None:
    placement = plan([Role("actor", 1), Role("rollout", 1, 2, is_separate=True)], 1, resource="x")
    assert placement.bundles == (NodePlan(0, 1), NodePlan(1, 2))


def test_roles_that_share_devices_are_placed_as_without_separate_roles() -> None:
    shared = [Role("actor", 2), Role("rollout", 2)]
    alone = plan(shared, 2, resource="x")
    both = plan([*shared, Role("reference", 1, is_separate=True)], 2, resource="x")
    assert both.assignments[: len(alone.assignments)] == alone.assignments


def test_the_plan_of_a_run_places_separate_roles(folder: Path) -> None:
    sets = (KL, JUDGE, "cluster.roles.rollout.devices=2", "cluster.roles.reference.devices=1")
    placement = resolved_plan(*sets, "cluster.roles.reward.devices=1").place("device")
    assert [(role.role, role.num_workers) for role in placement.roles] == [
        ("actor", 1),
        ("rollout", 2),
        ("reference", 1),
        ("reward", 1),
    ]
    assert placement.num_devices == 5


def test_without_a_cluster_this_machine_needs_the_devices_of_all_roles(folder: Path) -> None:
    sets = ("cluster.devices_per_node=2", "cluster.roles.rollout.devices=3")
    assert resolved_plan(*sets).num_local_devices == 5
    assert resolved_plan(*sets, "cluster.address=127.0.0.1:1").num_local_devices == 2


# --- checks


def test_listed_devices_must_follow_those_of_training_and_be_disjoint(folder: Path) -> None:
    sets = ("cluster.devices_per_node=2", KL, "cluster.roles.rollout.devices=[1, 2]")
    (line,) = mistakes("rollout.devices", *sets)
    assert_mentions(line, "cluster.roles.rollout.devices=", "device 1", "training")
    sets = (KL, "cluster.roles.rollout.devices=[1, 2]", "cluster.roles.reference.devices=[2]")
    (line,) = mistakes("reference.devices", *sets)
    assert_mentions(line, "cluster.roles.reference.devices=", "device 2", "cluster.roles.rollout")


def test_devices_must_hold_whole_copies_of_a_model(folder: Path) -> None:
    sets = (KL, "cluster.roles.reference.devices=3", "cluster.roles.reference.parallel.tp=2")
    (line,) = mistakes("reference.devices", *sets)
    assert_mentions(line, "cluster.roles.reference.devices=3", "multiple", "2")


def test_the_samples_of_a_step_must_divide_over_the_copies_of_the_reference(folder: Path) -> None:
    (line,) = mistakes("reference.devices", KL, "cluster.roles.reference.devices=3")
    assert_mentions(line, "cluster.roles.reference.devices=3", "32", "data-parallel")


def test_layout_and_micro_batch_of_a_role_need_devices(folder: Path) -> None:
    sets = (KL, "cluster.roles.reference.parallel.tp=2", "cluster.roles.reference.micro_batch=4")
    lines = mistakes("cluster.roles.reference", *sets)
    assert len(lines) == 2
    assert_mentions(lines[0], "cluster.roles.reference.parallel.tp=2", "devices")


def test_a_role_without_a_model_is_refused(folder: Path) -> None:
    (line,) = mistakes("cluster.roles.reference", "cluster.roles.reference.devices=1")
    assert_mentions(line, "cluster.roles.reference", "algo.kl.loss.coef")
    (line,) = mistakes("cluster.roles.reward", "cluster.roles.reward.devices=1")
    assert_mentions(line, "cluster.roles.reward", "megatron")


def test_the_exact_divergence_needs_the_reference_on_the_training_ranks(folder: Path) -> None:
    sets = (KL, "algo.kl.loss.estimator=full", "cluster.roles.reference.devices=1")
    (line,) = mistakes("reference.devices", *sets)
    assert_mentions(line, "cluster.roles.reference.devices=1", "algo.kl.loss.estimator=full")


def test_a_reference_with_another_vocabulary_is_refused(folder: Path) -> None:
    make_model(folder / "other", vocab_size=500)
    (line,) = mistakes("reference.load", KL, "cluster.roles.reference.load=other")
    assert_mentions(line, "cluster.roles.reference.load=other", "500", "1001")


def test_engines_must_fit_their_separate_devices(folder: Path) -> None:
    sets = ("cluster.roles.rollout.devices=2", "rollout.engine.dp=3")
    (line,) = mistakes("rollout.engine.dp", *sets)
    assert_mentions(line, "rollout.engine.dp=3", "cluster.roles.rollout.devices")


def test_nothing_is_offloaded_for_engines_with_separate_devices(folder: Path) -> None:
    sets = ("cluster.roles.rollout.devices=1", "train.offload.params=true")
    (line,) = mistakes("train.offload.params", *sets)
    assert_mentions(line, "train.offload.params=true", "cluster.roles.rollout.devices")
    sets = ("cluster.roles.rollout.devices=1", "rollout.engine.sleep=1")
    assert_mentions(mistakes("engine.sleep", *sets)[0], "rollout.engine.sleep=1")


# --- settings of ranks


def test_a_reference_is_the_initial_policy_or_has_its_own_folder(folder: Path) -> None:
    make_model(folder / "teacher")
    assert resolved_plan(KL).reference is resolved_plan(KL).policy or (
        resolved_plan(KL).reference == resolved_plan(KL).policy
    )
    plan_with_load = resolved_plan(KL, "cluster.roles.reference.load=teacher")
    settings = rank_settings(plan_with_load, "cpu")
    assert settings.reference is not None
    assert settings.reference.model == (folder / "teacher").absolute()
    assert (folder / "teacher").absolute() in loaded_models(plan_with_load, None)
    assert resolved_plan().reference is None


def test_a_reference_checkpoint_without_a_config_uses_that_of_the_policy(folder: Path) -> None:
    make_mcore(folder / "saved")
    (folder / "saved" / "hf" / "config.json").unlink()
    reference = resolved_plan(KL, "cluster.roles.reference.load=saved").reference
    assert reference is not None
    assert (reference.weights.name, reference.hf_dir.name) == ("saved", "model")


def test_with_adapters_a_reference_with_its_own_folder_is_a_replica(folder: Path) -> None:
    lora = ("train.lora.rank=4", KL)
    assert rank_settings(resolved_plan(*lora), "cpu").reference is None
    sets = (*lora, "cluster.roles.reference.load=model")
    assert rank_settings(resolved_plan(*sets), "cpu").reference is not None


def test_a_model_on_separate_devices_has_its_own_layout_and_is_not_offloaded(folder: Path) -> None:
    sets = (
        KL,
        JUDGE,
        "cluster.devices_per_node=4",
        "train.parallel.tp=2",
        "train.parallel.pp=2",
        "train.offload.params=true",
        "cluster.roles.reference.devices=4",
        "cluster.roles.reference.parallel={tp: 4, pp: 1}",
        "cluster.roles.reference.micro_batch=8",
        "cluster.roles.reward.devices=4",
    )
    run = resolved_plan(*sets)
    models = {"judge": folder / "judge"}
    shared = rank_settings(run, "cpu", reward_models=models)
    assert shared.reference is None and shared.reward_models == {}
    reference, reward = run.separate_model("reference"), run.separate_model("reward")
    assert reference is not None and reward is not None and reference.micro_batch == 8
    settings = separate_rank_settings(run, "cpu", reference, models)
    assert settings.layout == Layout(tp=4) and settings.policy is None
    assert settings.reference is not None and not settings.reference.offload.params
    settings = separate_rank_settings(run, "cpu", reward, models)
    assert settings.layout == Layout(tp=2, pp=2) and list(settings.reward_models) == ["judge"]


def test_another_number_of_stages_has_equal_stages(folder: Path) -> None:
    sets = (
        KL,
        "train.parallel.pp=2",
        "train.parallel.num_layer_list=1,3",
        "cluster.roles.reference.devices=1",
        "cluster.roles.reference.parallel.pp=1",
    )
    model = resolved_plan(*sets).separate_model("reference")
    assert model is not None and model.layout.num_layer_list is None


def test_a_critic_on_separate_devices_has_its_layout_and_is_not_on_the_training_ranks(
    folder: Path,
) -> None:
    sets = ("algo.preset=ppo", "cluster.roles.critic.devices=2", "cluster.roles.critic.load=judge")
    run = resolved_plan(*sets, "cluster.roles.critic.parallel.tp=2")
    assert rank_settings(run, "cpu").critic is None
    model = run.separate_model("critic")
    assert model is not None
    settings = separate_rank_settings(run, "cpu", model, {})
    assert settings.layout == Layout(tp=2) and settings.policy is None
    assert settings.critic is not None and settings.critic.optimizer is not None
    shared = training_memory(resolved_plan("algo.preset=ppo"))
    separate = training_memory(run)
    assert separate.critic.weights == 0 < separate.separate["critic"]
    assert separate.training < shared.training


def test_the_samples_of_an_update_must_divide_over_the_copies_of_the_critic(folder: Path) -> None:
    sets = ("algo.preset=ppo", "train.updates.samples_per_update=8")
    (line,) = mistakes("critic.devices", *sets, "cluster.roles.critic.devices=3")
    assert_mentions(line, "cluster.roles.critic.devices=3", "8", "data-parallel")


# --- memory


def test_models_on_separate_devices_leave_the_memory_of_training(folder: Path) -> None:
    shared = with_engine(training_memory(resolved_plan(KL)), resolved_plan(KL))
    sets = (KL, "cluster.roles.reference.devices=2", "cluster.roles.rollout.devices=1")
    run = resolved_plan(*sets, "cluster.roles.reference.parallel.tp=2")
    separate = with_engine(training_memory(run), run)
    assert shared.reference > 0 and separate.reference == 0
    assert 0 < separate.separate["reference"] < shared.reference
    assert separate.training == shared.training - shared.reference - shared.engine
    assert separate.generating == shared.engine


def test_a_shared_reward_model_with_experts_needs_sp_unless_the_policy_has_it(folder: Path) -> None:
    make_configs(folder, {"scorer": {**QWEN3_MOE, **MOE_SCORES}, "mixture": QWEN3_MOE})
    source = "reward.sources=[{model: scorer, engine: megatron}]"
    sets = ("cluster.devices_per_node=2", "train.parallel.tp=2", source)
    (line,) = mistakes("train.parallel.sp", *sets)
    assert_mentions(line, "reward.sources.0.model=scorer", "experts")
    assert not mistakes("train.parallel.sp", *sets, "train.parallel.sp=true")
    assert not mistakes("train.parallel.sp", *sets, "model.path=mixture")
