"""Environments of ROLL's agentic files and tools of MindSpeed-RL as msrl's section environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrl.config.sources import plain
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from msrl.importers.translation import KeyStatus, Translation
from support import assert_mentions, mentions
from test_imports_commands import RLVR, edit, native_tree
from test_imports_mindspeed_rl import MULTI_TURN, PRESENT, TOOL, folder, translate

__all__ = ["folder"]  # a fixture
REWARDS = (
    "rewards:\n  math_rule: {worker_cls: roll.rewards.MathRuleRewardWorker, tag_included: [math]}\n"
)
AGENTIC = (
    edit(
        RLVR,
        (REWARDS, ""),
        ("prompt_length: 1024\nresponse_length: 2048\n", "sequence_length: 1024\n"),
        ('"${response_length}"', "100"),
        ("gradient_accumulation_steps: 16", "gradient_accumulation_steps: 4"),
    )
    + """\
max_actions_per_traj: 5
max_tokens_per_step: 64
env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
lakes:
  Lake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${env_manager_cls}
    use_thread_lock: true
    env_config:
      {size: 5, p: 0.7, is_slippery: false, format_penalty: -0.2, max_steps: 5,
       action_pattern: "<answer>(.*?)</answer>"}
  Room:
    env_type: sokoban
    max_steps: 7
    max_tokens_per_step: 32
    env_config: {dim_room: [6, 6], num_boxes: 1, max_steps: 7}
custom_envs: {Lake: "${lakes.Lake}", Room: "${lakes.Room}"}
train_env_manager: {num_env_groups: 8, group_size: 8, tags: [Lake], num_groups_partition: [8]}
reward_normalization: {grouping: traj_group_id, method: mean}
"""
)
LAKE = {
    "name": "frozen_lake",
    "options": {
        "size": 5, "hole_share": 0.3, "slippery": False, "max_steps": 5, "invalid_reward": -0.2,
        "random_ends": True,
    },
}  # fmt: skip


def convert(text: str, folder: Path) -> Translation:
    file = folder / "given.yaml"
    file.write_text(text, encoding="utf-8")
    return translate_arguments("roll", [str(file)], approximate=True)


def tree(translation: Translation) -> Any:
    assert not translation.errors
    return native_tree(translation)


def test_an_environment_of_roll_becomes_that_of_msrl(tmp_path: Path):
    translation = convert(AGENTIC, tmp_path)
    native = tree(translation)
    limits = {"max_turns": 5, "max_turn_tokens": 64}
    assert native["environment"] == {**LAKE, **limits, "reward_at": "end"}
    assert native["algo"]["advantage"]["estimator"] == "reinforce"
    rollout = native["rollout"]
    assert (rollout["prompts_per_step"], rollout["samples_per_prompt"]) == (64 // 8, 8)
    assert (rollout["max_prompt_tokens"], rollout["max_response_tokens"]) == (512, 512)
    assert native["reward"]["norm"] == {"center": "group", "scale": "none"}
    (line,) = translation.differences
    assert_mentions(line, "env_type=frozen_lake", "--approximate")


def test_tags_of_roll_become_a_mixture_with_weights(tmp_path: Path):
    old = "tags: [Lake], num_groups_partition: [8]"
    text = edit(AGENTIC, (old, "tags: [Lake, Room], num_groups_partition: [6, 2]"))
    environment = tree(convert(text, tmp_path))["environment"]
    assert environment["mixture"]["Lake"] == {**LAKE, "weight": 6.0}
    room = environment["mixture"]["Room"]
    assert (room["name"], room["weight"], room["options"]["size"]) == ("sokoban", 2.0, 6)
    # Rewards of gym-sokoban.
    rewards = {key: room["options"][key] for key in ("step_reward", "box_reward", "success_reward")}
    assert rewards == {"step_reward": -0.1, "box_reward": 1.0, "success_reward": 10.0}
    assert (environment["max_turns"], environment["max_turn_tokens"]) == (7, 64)


@pytest.mark.parametrize(("method", "normalize"), [("mean", False), ("mean_std", True)])
def test_gigpo_of_roll_keeps_its_weights(method: str, normalize: bool, tmp_path: Path):
    text = edit(
        AGENTIC, ("adv_estimator: grpo", "adv_estimator: gigpo"), (": mean}", f": {method}}}")
    )
    text += "step_reward_weight: 0.5\nepisode_reward_weight: 1.0\nstep_reward_gamma: 0.9\n"
    native = tree(convert(text, tmp_path))
    options = {"omega": 0.5, "step_gamma": 0.9, "normalize": normalize, "count": "turns"}
    assert native["algo"]["options"] == options
    assert "norm" not in native.get("reward", {})


def test_sampling_of_the_environments_is_used_unless_the_engine_has_its_own(tmp_path: Path):
    old = "tags: [Lake], num_groups_partition: [8]"
    args = "generating_args: {temperature: 0.6, top_p: 0.5, top_k: 7, max_new_tokens: 48}"
    text = edit(AGENTIC, (old, f"{old}, {args}"))
    both = tree(convert(text, tmp_path))["rollout"]["sampling"]
    assert both == tree(convert(AGENTIC, tmp_path))["rollout"]["sampling"]  # of actor_infer
    lines = text.splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if line.startswith("actor_infer:"))
    number = next(n for n in range(start, len(lines)) if "generating_args" in lines[n])
    native = tree(convert("".join([*lines[:number], *lines[number + 1 :]]), tmp_path))
    assert native["rollout"]["sampling"] == {"temperature": 0.6, "top_p": 0.5, "top_k": 7}
    assert native["environment"]["max_turn_tokens"] == 48


NORMS = [
    ("{grouping: tags, method: mean_std}", "tag", "tag"),
    ("{grouping: inductive, method: mean}", "tag", "none"),
    ("{grouping: state, method: asym_clip}", "group", "group"),
    ("{grouping: traj_group_id, norm_mean_type: group, norm_std_type: batch}", "group", "batch"),
    ("{method: mean_std}", "batch", "batch"),
]


@pytest.mark.parametrize(("norm", "center", "scale"), NORMS)
def test_groupings_of_roll_become_scopes(norm: str, center: str, scale: str, tmp_path: Path):
    old = "{grouping: traj_group_id, method: mean}"
    native = tree(convert(edit(AGENTIC, (old, norm)), tmp_path))
    assert native["reward"]["norm"] == {"center": center, "scale": scale}
    steps = ("adv_estimator: grpo", "adv_estimator: step_reinforce")
    native = tree(convert(edit(AGENTIC, steps, (old, norm)), tmp_path))
    alone = "group" if "norm_std_type: batch" in norm else "none"
    options = {"step_gamma": 0.95, "center": center, "scale": scale, "zero_alone": alone}
    expected = {name: value for name, value in options.items() if value != "none"}
    assert native["algo"]["options"] == expected and "norm" not in native.get("reward", {})


def test_gigpo_of_roll_may_group_by_tag_and_an_unknown_grouping_is_refused(tmp_path: Path):
    gigpo = ("adv_estimator: grpo", "adv_estimator: gigpo")
    text = edit(AGENTIC, gigpo, ("grouping: traj_group_id", "grouping: tags"))
    assert tree(convert(text, tmp_path))["algo"]["options"]["grouping"] == "tag"
    wrong = edit(AGENTIC, ("grouping: traj_group_id", "grouping: weekday"))
    with pytest.raises(MsrlError, match=mentions("grouping=weekday", "inductive")):
        convert(wrong, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "keywords"),
    [
        ("env_type: frozen_lake", "env_type: webshop", ("env_type=webshop", "environment.path")),
        ("tags: [Lake]", "tags: [Lak]", ("custom_envs.Lak", "missing")),
        ("[8]}", "[4, 4]}", ("num_groups_partition", "tag")),
        ("tags: [Lake],", "tags: [Lake], group_size_redundancy: 2,", ("group_size_redundancy",)),
        ("traj_env_manager.TrajEnvManager", "x.VLTrajEnvManager", ("VLTrajEnvManager",)),
    ],
)
def test_an_environment_that_msrl_cannot_run_is_refused(old, new, keywords, tmp_path: Path):
    with pytest.raises(MsrlError, match=mentions(*keywords)):
        convert(edit(AGENTIC, (old, new)), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "keywords"),
    [
        ("traj_env_manager.TrajEnvManager", "x.StepEnvManager", ("StepEnvManager", "sequence")),
        ("use_thread_lock: true", "agent_template: 'Turn {turn_idx}'", ("agent_template",)),
        ("size: 5,", "size: 5, grid_lookup: {0: W},", ("grid_lookup",)),
    ],
)
def test_a_difference_to_an_environment_of_roll_is_reported(old, new, keywords, tmp_path: Path):
    translation = convert(edit(AGENTIC, (old, new)), tmp_path)
    (line,) = [line for line in translation.differences if "env_type" not in line]
    assert_mentions(line, *keywords, "--approximate")


def test_every_key_of_an_environment_of_roll_is_reported(tmp_path: Path):
    translation = convert(AGENTIC, tmp_path)
    paths = {result.entry.path for result in translation.key_results}
    for name in ("env_type", "max_steps", "env_config.size", "env_config.p", "use_thread_lock"):
        assert f"custom_envs.Lake.{name}" in paths
    assert {"train_env_manager.tags", "reward_normalization.method"} <= paths


def test_the_tool_of_mindspeed_rl_becomes_an_environment(folder: Path):
    keys = {
        **MULTI_TURN,
        "rl_config.max_tool_calls": 2,
        "rl_config.max_parallel_calls": 1,
        "rl_config.max_tool_response_length": 256,
        "rl_config.max_total_response_length": 1900,
    }
    translation = translate(PRESENT, folder, keys)
    assert not translation.errors and not translation.differences
    native = plain(translation.complete_tree())
    assert native["environment"] == {
        "name": "python_tool",
        "options": {"max_calls": 1, "max_output_chars": 256, "time_s": 20.0, "memory_mb": 256},
        "timeout_s": 35.0,
        "max_turns": 3,
        "max_turn_tokens": 2048,
    }
    assert native["rollout"]["max_response_tokens"] == 1900


def test_a_search_of_mindspeed_rl_needs_a_corpus(folder: Path):
    file = folder / "search.yaml"
    file.write_text(
        "tools: [{class_name: mindspeed_rl.tools.search_tool.SearchTool, config: {topk: 5}}]",
        encoding="utf-8",
    )
    translation = translate(
        PRESENT, folder, {**MULTI_TURN, "rl_config.tool_config_path": str(file)}
    )
    assert plain(translation.complete_tree())["environment"]["options"] == {"num_results": 5}
    (line,) = translation.differences
    assert_mentions(line, "tool_config_path", "environment.options.corpus")


@pytest.mark.parametrize(
    ("content", "keyword"),
    [("tools: []", "one tool"), ("tools: [{class_name: a.Other}]", "Other"), (None, "not found")],
)
def test_a_tool_that_msrl_does_not_have_is_refused(content, keyword, folder: Path):
    file = folder / "tool.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    translation = translate(
        PRESENT, folder, {**MULTI_TURN, "rl_config.tool_config_path": str(file)}
    )
    (line,) = translation.errors
    assert_mentions(line, "tool_config_path", keyword)


def test_keys_of_tools_are_dead_without_multi_turn(folder: Path):
    translation = translate(
        PRESENT, folder, {"rl_config.max_tool_calls": 3, "rl_config.tool_config_path": str(TOOL)}
    )
    statuses = {r.entry.key: r.status for r in translation.key_results}
    assert statuses["max_tool_calls"] is KeyStatus.DEAD
    assert "environment" not in plain(translation.complete_tree())
