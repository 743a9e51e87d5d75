"""Imported agentic files of ROLL have the advantages of ROLL's own functions.

P prompts with G episodes of several turns; N tokens of all answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import roll_oracle as oracle
from imported_steps import step_advantages
from msrl.config.schema import Config
from msrl.config.sources import plain
from msrl.errors import MsrlError
from msrl.importers.translation import KeyStatus
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
)
from support import assert_mentions, mentions
from test_imports_commands import edit
from test_imports_environments import AGENTIC, convert, tree
from test_imports_roll import GROUP, LENGTHS, PROMPT, flat, pipeline, roll_batch

NORM = "{grouping: traj_group_id, method: mean}"
NORMS: dict[str, dict[str, str]] = {
    "none": {"method": "identity"},
    "mean of groups": {"grouping": "traj_group_id", "method": "mean"},
    "groups": {"grouping": "traj_group_id", "method": "mean_std"},
    "tags": {"grouping": "tags", "method": "mean_std"},
    "mean of the step": {"grouping": "batch", "method": "mean"},
    "step": {"grouping": "batch", "method": "mean_std"},
    "mean of groups, deviation of the step": {
        "grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch",
    },
}  # fmt: skip
KEYS: dict[str, list[str]] = {
    "grpo": [],
    "grpo, whitened": ["whiten_advantages: true"],
    "grpo, clipped": ["reward_clip: 0.6"],
    "grpo, a penalty of kl": [
        "add_token_level_kl: true", "kl_penalty: kl", "init_kl_coef: 0.3", "kl_horizon: 10000",
    ],
    "reinforce": ["adv_estimator: reinforce"],
    "reinforce, whitened and clipped": [
        "adv_estimator: reinforce", "whiten_advantages: true", "advantage_clip: 0.7",
    ],
    "agentic_reinforce": ["adv_estimator: agentic_reinforce"],
    "agentic_reinforce, discounted": [
        "adv_estimator: agentic_reinforce", "gamma: 0.9",
    ],
}  # fmt: skip
TURN_REWARDS = np.arange(len(LENGTHS)) % 3 / 4 - 0.25
MIN_TOKENS = 3  # of an episode of two turns: the second token belongs to the environment


def groups() -> list[ScoredGroup]:
    """Return episodes, of one turn or of two turns with rewards; the tags are a and b."""
    scores = np.arange(len(LENGTHS)) * 5 % 7 / 3
    result: list[ScoredGroup] = []
    for number in range(len(LENGTHS) // GROUP):
        rows = range(number * GROUP, (number + 1) * GROUP)
        completions = tuple(_episode(LENGTHS[row], float(TURN_REWARDS[row])) for row in rows)
        prompt = Prompt(number, np.array([1]), "", {"tag": "ab"[number % 2]})
        rewards = tuple(Reward(float(scores[row]), {}) for row in rows)
        result.append(ScoredGroup(RolloutGroup(prompt, completions), rewards))
    return result


def _episode(length: int, reward: float) -> Completion:
    """Return an episode of `length` tokens of the policy and of the environment."""
    tokens, turns = np.arange(1 + length), (EpisodeTurn(length, "s", "stop", reward),)
    mask = tokens > 0
    if length >= MIN_TOKENS:
        mask[2] = False
        first = EpisodeTurn(1, "s", "stop", reward)
        turns = (first, EpisodeTurn(length - 2, "t", "stop", 0.5))
    record = Episode((TokenSequence(tokens, mask),), turns, (), None)
    sampled = tokens[mask]
    logprobs = np.zeros(len(sampled), np.float32)
    return Completion(sampled, logprobs, "stop", 0, "", (), record)


def agentic_batch() -> oracle.Batch:
    """Return the padded tensors of these episodes."""
    batch = roll_batch(0)
    has_reply = torch.tensor(LENGTHS) >= MIN_TOKENS
    batch["response_mask"][has_reply, PROMPT + 1] = 0
    return batch


def our_advantages(config: Config, batch: oracle.Batch) -> np.ndarray:  # [N]
    """Return the advantages of a step, as the driver computes them from scored groups."""
    names = ("old_log_probs", "ref_log_probs")
    return step_advantages(config, groups(), *(flat(batch, batch[name]) for name in names))


@pytest.mark.sample(14)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("keys", KEYS)
def test_the_advantages_of_an_agentic_file_are_those_of_the_pipeline(
    keys: str, norm: str, tmp_path: Path
) -> None:
    lines, values = KEYS[keys], NORMS[norm]
    names = {line.split(":")[0] for line in lines}
    unchanged = [line for line in AGENTIC.splitlines() if line.split(":")[0] not in names]
    section = ", ".join(f"{key}: {value}" for key, value in values.items())
    text = edit("\n".join([*unchanged, *lines, ""]), (NORM, f"{{{section}}}"))
    config = Config.model_validate(tree(convert(text, tmp_path)))
    batch = agentic_batch()
    rows = np.arange(len(LENGTHS)) // GROUP
    labels = {"traj_group_id": rows.astype(str), "tags": np.array(["a", "b"])[rows % 2]}
    scores = torch.tensor([reward.total for group in groups() for reward in group.rewards])
    theirs = oracle.episode_advantages(pipeline(lines), batch, scores.double(), labels, values)
    actual, expected = our_advantages(config, batch), flat(batch, theirs).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


STEPS = "gradient_accumulation_steps: 4"
TWICE = (
    (STEPS, "gradient_accumulation_steps: 8"),
    (NORM, "{grouping: traj_group_id, method: mean_std}"),
)


@pytest.mark.parametrize("keys", ["grpo", "grpo, whitened", "grpo, clipped"])
def test_trajectories_that_all_count_twice_have_the_advantages_of_the_pipeline(
    keys: str, tmp_path: Path
) -> None:
    lines, values = KEYS[keys], NORMS["groups"]
    translation = convert(edit("\n".join([AGENTIC, *lines, ""]), *TWICE), tmp_path)
    assert not [line for line in translation.differences if "env_type" not in line]
    config = Config.model_validate(tree(translation))
    assert (config.algo.advantage.correction, config.train.updates.samples_per_update) == (0.5, 64)
    batch, rows = agentic_batch(), np.arange(len(LENGTHS)) // GROUP
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(LENGTHS)))
    both = oracle.Batch({name: torch.cat([rows, rows[order]]) for name, rows in batch.items()})
    groups_of = np.concatenate([rows, rows[order.numpy()]]).astype(str)
    labels = {"traj_group_id": groups_of, "tags": np.full(len(groups_of), "a")}
    scores = torch.tensor([reward.total for group in groups() for reward in group.rewards])
    scores = torch.cat([scores, scores[order]]).double()
    theirs = oracle.episode_advantages(pipeline(lines), both, scores, labels, values)
    expected = flat(batch, theirs[: len(LENGTHS)]).numpy()
    np.testing.assert_allclose(our_advantages(config, batch), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        ("adv_estimator: grpo", "adv_estimator: reinforce"),
        ("infer_batch_size: 4", "infer_batch_size: 256"),
        (NORM, "{grouping: batch, method: mean_std}"),
    ],
)
def test_trajectories_that_do_not_all_count_twice_alike_are_reported(
    change: tuple[str, str], tmp_path: Path
) -> None:
    changes = [TWICE[0], *([TWICE[1]] if change[0] != NORM else []), change]
    differences = "\n".join(convert(edit(AGENTIC, *changes), tmp_path).differences)
    assert_mentions(differences, "gradient_accumulation_steps=8", "repeats", "--approximate")


WORKER = "actor_train:\n"


def with_worker(*lines: str) -> str:
    """Return an agentic file with these keys of actor_train."""
    return edit(AGENTIC, (WORKER, WORKER + "".join(f"  {line}\n" for line in lines)))


def test_the_policy_loss_of_agentic_files_is_that_of_their_worker(tmp_path: Path) -> None:
    module = "roll.pipeline.agentic.agentic_actor_pg_worker"
    text = with_worker(f"worker_cls: {module}.ActorWorker", "pg_variant: topr")
    assert tree(convert(text, tmp_path))["algo"]["policy_loss"] == "topr"
    usual = with_worker(f"worker_cls: {module[:-10]}worker.ActorWorker", "pg_variant: topr")
    assert "policy_loss" not in tree(convert(usual, tmp_path))["algo"]


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("rl_loss_coef: 0.5", "algo.rl_coef"),
        ("importance_sampling: seq", "algo.ratio"),
        ("max_len_mask: true", "algo.mask"),
        ("difficulty_mask: true", "algo.mask"),
        ("length_loss_weight: true", "algo.sample_weight"),
        ("query_filter_config: {type: mean_filter}", "rollout.filter"),
    ],
)
def test_keys_that_only_rlvr_reads_have_no_effect_in_agentic_files(
    line: str, native: str, tmp_path: Path
) -> None:
    translation = convert(f"{AGENTIC}{line}\n", tmp_path)
    key = line.partition(":")[0]
    (result,) = [row for row in translation.key_results if row.entry.key == key]
    assert result.status is KeyStatus.DEAD
    assert tree(translation) == tree(convert(AGENTIC, tmp_path)), native


def test_a_discount_over_the_tokens_of_environments_is_reported(tmp_path: Path) -> None:
    line, _ = convert(f"{AGENTIC}gamma: 0.9\n", tmp_path).differences
    assert_mentions(line, "gamma=0.9", "--approximate")


def test_gigpo_of_roll_without_means_is_reported(tmp_path: Path) -> None:
    text = edit(AGENTIC, ("adv_estimator: grpo", "adv_estimator: gigpo"))
    lines = convert(text, tmp_path).differences
    assert not any("identity" in line for line in lines)
    lines = convert(edit(text, ("method: mean}", "method: identity}")), tmp_path).differences
    (line,) = [line for line in lines if "reward_normalization" in line]
    assert_mentions(line, "reward_normalization", "identity", "--approximate")


def test_an_update_has_at_most_the_episodes_of_a_step(tmp_path: Path) -> None:
    text = edit(AGENTIC, ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 16"))
    translation = convert(text, tmp_path)
    assert tree(translation)["train"]["updates"]["samples_per_update"] == 64
    (line,) = [line for line in translation.differences if "env_type" not in line]
    assert_mentions(line, "gradient_accumulation_steps", "repeats", "--approximate")


def test_the_native_sokoban_renders_the_whole_conversation(tmp_path: Path) -> None:
    text = edit(
        AGENTIC,
        ("tags: [Lake]", "tags: [Room]"),
        ("env_type: sokoban", "env_type: sokoban_native_env"),
        (
            "    max_steps: 7\n",
            "    max_steps: 7\n    env_manager_cls: roll.x.AgentNativeStepEnvManager\n",
        ),
        ("{dim_room: [6, 6], num_boxes: 1, max_steps: 7}", "{max_steps: 7}"),
    )
    translation = convert(text, tmp_path)
    environment = tree(translation)["environment"]
    assert (environment["name"], environment["history"]) == ("sokoban", "template")
    options = {"size": 6, "num_boxes": 1, "max_steps": 7, "invalid_reward": -0.1}
    assert environment["options"].items() >= options.items()
    assert any("AgentNativeStepEnvManager" in line for line in translation.differences)


def test_recording_rollouts_changes_nothing_and_recorded_ones_are_refused(tmp_path: Path) -> None:
    mock = "rollout_mock: {{enable: true, mode: {}}}\n"
    assert tree(convert(AGENTIC + mock.format("dump"), tmp_path)) == tree(
        convert(AGENTIC, tmp_path)
    )
    with pytest.raises(MsrlError, match=mentions("rollout_mock", "recorded")):
        convert(AGENTIC + mock.format("mock"), tmp_path)


CORRECTION = "train_infer_correction: {{{}}}\n"


def test_the_weight_of_a_correction_is_imported_exactly(tmp_path: Path) -> None:
    text = AGENTIC + CORRECTION.format("is_weight: {enabled: true, weight_type: sequence}")
    translation = convert(text, tmp_path)
    assert tree(translation)["algo"]["mismatch"] == {"weight": "sequence", "upper": 1.2}
    assert not [line for line in translation.differences if "correction" in line]
    off = AGENTIC + CORRECTION.format("is_weight: {enabled: false}, filters: [{agg_type: token}]")
    assert "mismatch" not in tree(convert(off, tmp_path))["algo"]


@pytest.mark.parametrize(
    ("kind", "native"),
    [("token", "token"), ("geometric", "sequence"), ("sequence", "sequence-product")],
)
def test_a_filter_of_ratios_is_imported_with_other_averages(
    kind: str, native: str, tmp_path: Path
) -> None:
    keys = f"filters: [{{enabled: true, agg_type: {kind}, ratio_low: 0.7}}]"
    translation = convert(AGENTIC + CORRECTION.format(keys), tmp_path)
    expected = {"filter": native, "low": 0.7, "high": 1.2}
    assert plain(translation.complete_tree())["algo"]["mismatch"] == expected
    (line,) = [line for line in translation.differences if "correction" in line]
    assert_mentions(line, "averages", "--approximate")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("keys", "keywords"),
    [
        ("is_weight: {enabled: true, weight_type: segment}", ("weight_type=segment", "sequence")),
        ("is_weight: {enabled: true, upper_bound: null}", ("upper_bound=null", "bound")),
        ("is_weight: {enable: true}", ("enable", "unknown")),
        ("is_wieght: {enabled: true}", ("is_wieght", "unknown")),
        ('is_weight: {enabled: "true"}', ("enabled", "true or false")),
        ("is_weight: {enabled: 1}", ("enabled=1", "true or false")),
        ("is_weight: {enabled: true, detach: 1}", ("detach=1", "true or false")),
        ("is_weight: {enabled: true, upper_bound: high}", ("upper_bound=high", "number")),
        ("is_weight: false", ("sections",)),
        ("filters: [{enabled: 1}]", ("enabled=1", "true or false")),
        ("filters: [{enabled: true, ratio_enabled: 0}]", ("ratio_enabled=0", "true or false")),
        ("filters: [{enabled: true, ratio_low: null}]", ("ratio_low", "number")),
        ("filters: {enabled: true}", ("filters", "list")),
    ],
)
def test_corrections_that_msrl_does_not_have_are_refused_by_name(
    keys: str, keywords: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions("train_infer_correction", *keywords)):
        convert(AGENTIC + CORRECTION.format(keys), tmp_path)


@pytest.mark.parametrize(
    ("keys", "keyword"),
    [
        ("filters: [{enabled: true, agg_type: segment}]", "agg_type=segment"),
        ("filters: [{enabled: true, diff_enabled: true}]", "diff_enabled"),
        ("filters: [{enabled: true}, {enabled: true}]", "several"),
    ],
)
def test_filters_that_msrl_does_not_have_are_refused_or_dropped(
    keys: str, keyword: str, tmp_path: Path
) -> None:
    translation = convert(AGENTIC + CORRECTION.format(keys), tmp_path)
    assert_mentions("\n".join(translation.differences), "train_infer_correction", keyword)
    assert "mismatch" not in tree(translation)["algo"]


QUESTIONS = """\
own_text: "Think first. {observation}"
questions:
  Math:
    env_type: roll_math
    agent_template: ${own_text}
    env_config: {dataset_name: a/b, question_key: prompt, answer_key: solution, max_steps: 9}
WRAPPER
custom_envs: {Lake: "${lakes.Lake}", Room: "${lakes.Room}", Math: "${questions.Math}"}
"""
WRAPPER = """\
    tool_wrapper:
      wrapper_args: {tool_reward: 0, tool_success_reward: REWARD, max_tool_uses: 2}
      tool_configs: [{tool_id: TOOL, tool_args: {ARGS}}]
"""
ARGS = {
    "python_code": "timeout: 45, sandbox_type: none",
    "search": "timeout: 7",
    "mcp": 'server_url: "http://127.0.0.1:9"',
}


def questions(tool: str = "", reward: str = "0") -> str:
    """Return an agentic file with questions, and with a tool if it is not empty."""
    wrapper = WRAPPER.replace("TOOL", tool).replace("REWARD", reward) if tool else ""
    wrapper = wrapper.replace("ARGS", ARGS.get(tool, ""))
    lakes = 'custom_envs: {Lake: "${lakes.Lake}", Room: "${lakes.Room}"}\n'
    text = edit(AGENTIC, (lakes, QUESTIONS.replace("WRAPPER\n", wrapper)))
    return edit(text, ("tags: [Lake]", "tags: [Math]"))


@pytest.mark.parametrize(
    ("tool", "name", "options"),
    [
        ("", "single_turn", {}),
        ("python_code", "python_tool", {"max_calls": 1, "time_s": 45.0}),
        ("search", "search", {"max_calls": 1, "num_results": 3}),
        ("mcp", "mcp", {"url": "http://127.0.0.1:9"}),
    ],
)
def test_questions_of_roll_become_environments_with_a_verifier(
    tool: str, name: str, options: dict[str, object], tmp_path: Path
) -> None:
    translation = convert(questions(tool), tmp_path)
    native = tree(translation)
    assert native["environment"]["name"] == name and native["environment"]["options"] == options
    assert native["environment"]["max_turns"] == (3 if tool else 5)
    assert native["environment"].get("timeout_s") == (60.0 if tool == "python_code" else None)
    assert native["reward"]["sources"] == [{"verifier": "math_verify_reward"}]
    assert any("env_type=roll_math" in line for line in translation.differences)
    corpus = [line for line in translation.differences if "environment.options.corpus" in line]
    assert len(corpus) == (tool == "search")


def test_answers_of_roll_qa_are_compared_as_text(tmp_path: Path) -> None:
    text = edit(questions(), ("env_type: roll_math", "env_type: roll_qa"))
    (source,) = tree(convert(text, tmp_path))["reward"]["sources"]
    assert source == {"verifier": "exact_match", "options": {"part": "answer", "ignore_case": True}}
    text = edit(text, ("max_steps: 9}", "extract_boxed: true}"))
    (source,) = tree(convert(text, tmp_path))["reward"]["sources"]
    assert source["options"]["part"] == "boxed"


@pytest.mark.parametrize(
    ("text", "keywords"),
    [
        (questions("browser"), ("tool_wrapper", "python_code", "environment.path")),
        (
            edit(AGENTIC, ("use_thread_lock: true", "tool_wrapper: {tool_configs: []}")),
            ("tool_wrapper", "game", "environment.path"),
        ),
        (
            edit(
                questions(),
                ("tags: [Math], num_groups_partition: [8]", "tags: [Math, Lake]"),
            ),
            ("env_type=roll_math", "several tags"),
        ),
    ],
)
def test_questions_that_msrl_cannot_ask_are_refused(
    text: str, keywords: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(*keywords)):
        convert(text, tmp_path)


def test_rewards_of_calls_are_reported(tmp_path: Path) -> None:
    translation = convert(questions("python_code", reward="0.1"), tmp_path)
    (line,) = [line for line in translation.differences if "tool_wrapper" in line]
    assert_mentions(line, "tool_success_reward=0.1", "--approximate")


def test_variables_of_a_file_are_no_unknown_keys(tmp_path: Path) -> None:
    translation = convert(questions(), tmp_path)
    statuses = {row.entry.path: row.status for row in translation.key_results}
    assert statuses["own_text"] is statuses["questions"] is KeyStatus.APPLIED
    known = edit(questions(), ("own_text", "use_token_reward"))
    with pytest.raises(MsrlError, match=mentions("use_token_reward", "not supported")):
        convert(known, tmp_path)
    unused = edit(questions(), ("own_text: ", "agent_templates: 1\nown_text: "))
    with pytest.raises(MsrlError, match=mentions("agent_templates", "unknown")):
        convert(unused, tmp_path)
