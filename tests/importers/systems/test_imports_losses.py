"""Losses, whitening and rewards of imported files mean what they mean in the original."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.translation import KeyStatus, Translation
from support import assert_mentions, mentions
from test_imports_commands import RLVR, edit

RL = """\
megatron_training: {{stage: {stage}, global_batch_size: 8, train_iters: 2}}
actor_config: {{lr: 1e-6, micro_batch_size: {micro}, load: ckpt}}
rl_config:
  {{n_samples_per_prompt: 4, mini_batch_size: 8, {more} actor_resource: {{num_npus: {npus}}}}}
generate_config: {{infer_tensor_parallel_size: 1, sampling_config: {{max_tokens: 64}}}}
"""


def convert(
    system: str, text: str, folder: Path, suffix: str = "yaml", *, approximate: bool = False
) -> Translation:
    file = folder / f"given.{suffix}"
    file.write_text(text, encoding="utf-8")
    return translate_arguments(system, [str(file)], approximate=approximate)


def native(translation: Translation) -> Any:
    return plain(parse(native_yaml(translation), "native.yaml"))


def mindspeed(stage: str = "ray_grpo", micro: int = 1, npus: int = 1, more: str = "") -> str:
    return RL.format(stage=stage, micro=micro, npus=npus, more=more)


@pytest.mark.parametrize(
    ("file", "mode"),
    [
        (mindspeed(), "seq-mean-token-mean"),
        (mindspeed(npus=4), "seq-mean-token-mean"),
        (mindspeed(micro=32), "token-mean"),
        (mindspeed("ray_dapo", micro=4, more="token_level_loss: false,"), "seq-mean-token-mean"),
        (mindspeed("ray_dapo"), "seq-mean-token-mean"),
        (
            mindspeed(micro=4, more="use_dynamic_bsz: true, update_dynamic_max_batch_size: 1,"),
            "seq-mean-token-mean",
        ),
    ],
)
def test_averages_per_micro_batch_become_the_equal_mode(
    file: str, mode: str, tmp_path: Path
) -> None:
    tree = native(convert("mindspeed-rl", file, tmp_path))
    assert tree["algo"]["aggregate"]["mode"] == mode


@pytest.mark.parametrize(
    ("file", "aggregate", "shards"),
    [
        (mindspeed(micro=4), {"samples_per_group": 4}, None),
        (mindspeed(micro=16, npus=2), {"samples_per_group": 16}, 2),
        (mindspeed(more="use_dynamic_bsz: true,"), {"tokens_per_group": 4096}, None),
        (
            mindspeed(more="use_dynamic_bsz: true, update_max_packing_token_size: 9000,", npus=4),
            {"tokens_per_group": 9000},
            4,
        ),
    ],
)
def test_other_averages_have_the_groups_of_the_original(
    file: str, aggregate: dict[str, int], shards: int | None, tmp_path: Path
) -> None:
    tree = native(convert("mindspeed-rl", file, tmp_path))
    assert tree["algo"]["aggregate"] == {"mode": "micro-batch-mean", **aggregate}
    assert tree["train"]["updates"].get("shards") == shards


def test_shuffled_micro_batches_are_refused_or_approximated(tmp_path: Path) -> None:
    """msrl shuffles samples, the original batches of consecutive ones."""
    file, key = mindspeed(micro=4, more="shuffle_mini_batch: true,"), "micro_batch_size=4"
    file = re.sub(r"([, {]mini_batch_size: )\d+", r"\g<1>2", file)
    with pytest.raises(MsrlError, match=mentions(key, "micro-batches", "--approximate")):
        convert("mindspeed-rl", file, tmp_path)
    translation = convert("mindspeed-rl", file, tmp_path, approximate=True)
    assert native(translation)["algo"]["aggregate"]["mode"] == "token-mean"
    assert_mentions(report(translation), "results differ")


def original_mean(losses: torch.Tensor, mask: torch.Tensor, micro: int) -> torch.Tensor:
    """Return the mean over micro-batches of their token means, as in the original."""
    micro_batches = zip(losses.split(micro), mask.split(micro), strict=True)
    means = [(loss * is_loss).sum() / is_loss.sum() for loss, is_loss in micro_batches]
    return torch.stack(means).mean()


def test_the_two_modes_equal_the_averages_of_the_original() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(12, 9, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 10, (12,), generator=generator)
    mask = (torch.arange(9) < lengths[:, None]).double()
    by_sequence = ((losses * mask).sum(1) / lengths).mean()
    by_token = (losses * mask).sum() / mask.sum()
    assert torch.isclose(original_mean(losses, mask, 1), by_sequence)
    assert torch.isclose(original_mean(losses, mask, 12), by_token)
    assert not torch.isclose(original_mean(losses, mask, 4), by_token)


# --- ROLL


def test_generation_ahead_of_training_is_refused_or_approximated(tmp_path: Path) -> None:
    file = roll("async_generation_ratio: 1.5")
    with pytest.raises(MsrlError, match=mentions("async_generation_ratio=1.5", "--approximate")):
        convert("roll", file, tmp_path)
    tree = native(convert("roll", file, tmp_path, approximate=True))
    assert tree["rollout"]["async"]["max_staleness"] == 2
    assert (
        "async"
        not in native(convert("roll", roll("async_generation_ratio: 0"), tmp_path))["rollout"]
    )


def test_float16_is_refused_or_approximated_by_bfloat16(tmp_path: Path) -> None:
    file = edit(RLVR, ("  infer_batch_size: 4\n", "  model_args: {dtype: fp16}\n"))
    with pytest.raises(MsrlError, match=mentions("dtype=fp16", "float16", "--approximate")):
        convert("roll", file, tmp_path)
    tree = native(convert("roll", file, tmp_path, approximate=True))
    assert tree["model"]["dtype"] == "bfloat16"


PG = "  infer_batch_size: 4\n  worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker\n"


def roll(*lines: str, worker: str = "") -> str:
    text = RLVR.replace("  infer_batch_size: 4\n", worker) if worker else RLVR
    return text + "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("worker", "algo"),
    [
        ("", {}),
        ("  infer_batch_size: 4\n  pg_variant: topr\n", {}),
        (
            f"{PG}  pg_variant: topr\n",
            {"policy_loss": "topr", "options": {"level": "token", "split": "reward"}},
        ),
        (PG, {"policy_loss": "vanilla"}),
        (f"{PG}  pg_variant: cispo\n", {"policy_loss": "cispo", "clip": {"low": 0.1, "high": 0.1}}),
        (f"{PG}  pg_variant: ppo\n", {"policy_loss": "ppo", "clip": {"low": 0.2, "high": 0.2}}),
    ],
)
def test_the_policy_loss_of_roll_is_that_of_its_worker(
    worker: str, algo: dict[str, Any], tmp_path: Path
) -> None:
    tree = native(convert("roll", roll(worker=worker), tmp_path))["algo"]
    for key in ("policy_loss", "options"):
        assert tree.get(key) == algo.get(key)
    if "clip" in algo:
        assert tree["clip"] == algo["clip"]


TOPR = f"{PG}  pg_variant: topr\n"
JUDGED = (("MathRuleRewardWorker", "CrossThinkQARuleRewardWorker"),)


def test_topr_is_reported_where_rewards_may_not_be_scores(tmp_path: Path) -> None:
    text = edit(roll(worker=TOPR), *JUDGED)
    with pytest.raises(MsrlError, match=mentions("pg_variant=topr", "score", "--approximate")):
        convert("roll", text, tmp_path)
    translation = convert("roll", text, tmp_path, approximate=True)
    assert native(translation)["algo"]["policy_loss"] == "topr"
    assert_mentions(report(translation), "pg_variant=topr", "may differ")


@pytest.mark.parametrize("line", ["add_token_level_kl: true", "whiten_advantages: true"])
def test_topr_splits_responses_by_their_rewards(line: str, tmp_path: Path) -> None:
    options = native(convert("roll", roll(line, worker=TOPR), tmp_path))["algo"]["options"]
    assert options["split"] == "reward"


def test_unknown_policy_losses_of_roll_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("no_such_loss", "policy loss")):
        convert("roll", roll(worker=f"{PG}  pg_variant: no_such_loss\n"), tmp_path)


def test_sum_norm_of_roll_divides_by_the_padded_width_alone(tmp_path: Path) -> None:
    tree = native(convert("roll", roll("loss_agg_mode: seq-mean-token-sum-norm"), tmp_path))
    assert tree["algo"]["aggregate"] == {
        "mode": "seq-sum-over-constant",
        "constant": 1024 + 2048 - 1,
    }


def test_a_reward_clip_after_the_normalization_clips_advantages_or_normalized_rewards(
    tmp_path: Path,
) -> None:
    tree = native(convert("roll", roll("reward_clip: 5"), tmp_path))
    assert tree["algo"]["advantage"]["clip"] == 5 and "clip" not in tree["reward"]
    whitened = roll("reward_clip: 5", "whiten_advantages: true")
    tree = native(convert("roll", whitened, tmp_path))
    assert tree["reward"]["norm"]["clip"] == [-5.0, 5.0]
    assert tree["algo"]["advantage"]["estimator"] == "reinforce"
    penalty = roll("reward_clip: 5", "add_token_level_kl: true")
    with pytest.raises(MsrlError, match=mentions("reward_clip=5", "penalty")):
        convert("roll", penalty, tmp_path)
    plain_rewards = edit(roll("reward_clip: 5"), ("estimator: grpo", "estimator: reinforce"))
    assert native(convert("roll", plain_rewards, tmp_path))["reward"]["clip"] == 5


TWO_DOMAINS = edit(
    RLVR,
    (
        "tag_included: [math]}\n",
        "tag_included: [math]}\n  code: {worker_cls: CodeSandboxRewardWorker, tag_included: [c]}\n",
    ),
)


def test_several_domains_are_whitened_one_by_one(tmp_path: Path) -> None:
    assert "whiten_scope" not in native(convert("roll", TWO_DOMAINS, tmp_path))["algo"]["advantage"]
    tree = native(convert("roll", f"{TWO_DOMAINS}whiten_advantages: true\n", tmp_path))
    assert tree["algo"]["advantage"]["whiten_scope"] == "domain"


@pytest.mark.parametrize(
    ("lines", "norm"),
    [
        (("reward_norm: batch",), {"center": "batch", "scale": "batch"}),
        (("reward_norm: group", "reward_shift: true"), {"center": "group"}),
        (("reward_norm: running", "reward_scale: true"), {"scale": "running"}),
        (("reward_norm: batch", "norm_mean_type: group"), {"center": "group"}),
    ],
)
def test_the_old_normalization_of_roll_is_used(
    lines: tuple[str, ...], norm: dict[str, str], tmp_path: Path
) -> None:
    text = edit(roll(*lines), ("estimator: grpo", "estimator: reinforce"))
    assert native(convert("roll", text, tmp_path))["reward"]["norm"] == norm


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [("sft_loss_coef: 0.1", "sft", {"coef": 0.1}), ("use_topr_loss: true", "policy_loss", "topr")],
)
def test_removed_losses_of_roll_are_approximated(
    line: str, key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(line.split(":")[0], "--approximate")):
        convert("roll", roll(line), tmp_path)
    translation = convert("roll", roll(line), tmp_path, approximate=True)
    assert native(translation)["algo"][key] == value


def test_recomputation_of_experts_and_modules_of_roll(tmp_path: Path) -> None:
    text = edit(RLVR, ("sequence_parallel: true", "moe_layer_recompute: true"))
    tree = native(convert("roll", text, tmp_path))
    assert tree["train"]["recompute"] == {"granularity": "selective", "modules": ["moe"]}


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        (RLVR + "diffusion_process: {}\n", "diffusion"),
        (
            edit(RLVR, ("  infer_batch_size: 4", "  data_args: {video_max_pixels: 9}")),
            "videos",
        ),
    ],
)
def test_other_pipelines_of_roll_are_refused_in_one_line(
    text: str, feature: str, tmp_path: Path
) -> None:
    with pytest.raises(MsrlError) as caught:
        convert("roll", text, tmp_path)
    assert "\n" not in str(caught.value)
    assert_mentions(str(caught.value), "given.yaml", "not supported", feature)


# --- LightRFT

FLAGS = (
    "torchrun --nnodes 1 --nproc-per-node 8 train_colocate.py --pretrain model --prompt_data x "
    "--rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 128 --text_only "
)


@pytest.mark.parametrize(
    ("flags", "whitens"),
    [
        ("--advantage_estimator reinforce", True),
        ("--advantage_estimator gae", True),
        ("--advantage_estimator group_norm --advantages_norm", None),
        ("--advantage_estimator cpgd --advantages_norm", None),
    ],
)
def test_lightrft_whitens_by_estimator(flags: str, whitens: bool | None, tmp_path: Path) -> None:
    tree = native(convert("lightrft", FLAGS + flags, tmp_path, "sh"))
    assert tree["algo"]["advantage"].get("whiten") == whitens


@pytest.mark.parametrize(("estimator", "mode"), [("gae", "seq-mean-token-mean"), ("rloo", None)])
def test_the_critic_of_lightrft_averages_sequences(
    estimator: str, mode: str | None, tmp_path: Path
) -> None:
    text = f"{FLAGS} --advantage_estimator {estimator}"
    algo = native(convert("lightrft", text, tmp_path, "sh"))["algo"]
    assert algo.get("value", {}).get("aggregate") == mode


def test_cpgd_of_lightrft_has_no_drift(tmp_path: Path) -> None:
    text = f"{FLAGS} --advantage_estimator group_norm --use_cpg_loss"
    tree = native(convert("lightrft", text, tmp_path, "sh"))["algo"]
    assert (tree["policy_loss"], tree["options"]) == ("cpgd", {"drift": 0.0})


def test_empty_reward_models_of_lightrft_are_its_rules(tmp_path: Path) -> None:
    text = f"{FLAGS} --advantage_estimator group_norm --reward_pretrain '{{}}' --engine_tp_size 2"
    tree = native(convert("lightrft", text, tmp_path, "sh"))
    sources = tree["reward"]["sources"]
    assert [(source["verifier"], source["weight"]) for source in sources] == [
        ("math_17k_acc", 0.9),
        ("regex_match", 0.1),
    ]
    assert tree["rollout"]["engine"] | {"tp": 2, "dp": 4} == tree["rollout"]["engine"]
    assert tree["cluster"] == {"devices_per_node": 8, "nodes": 1}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think> \\boxed{1}", 1.0),
        ("x <think>a\nb</think>\n\\boxed{1} \\boxed{2}", 1.0),
        ("\\boxed{1} <think>a</think> \\boxed{1}", 0.0),
        ("<think>a \\boxed{1}</think> \\boxed{1}", 0.0),
        ("<think>a</think> 1", 0.0),
    ],
)
def test_the_format_rule_of_lightrft_is_kept(response: str, score: float, tmp_path: Path) -> None:
    """The first box of the response must follow the end of the first thought."""
    from msrl.rewards.verifiers import regex_match

    text = f"{FLAGS} --advantage_estimator group_norm --reward_pretrain '{{}}'"
    tree = native(convert("lightrft", text, tmp_path, "sh"))
    pattern = tree["reward"]["sources"][1]["options"]["pattern"]
    assert regex_match.score(response, "", pattern=pattern) == score


def test_secrets_of_a_script_are_not_written(tmp_path: Path) -> None:
    text = f'export WANDB_API_KEY="s3cret"\n{FLAGS} --use_wandb "${{WANDB_API_KEY}}"'
    translation = convert("lightrft", text, tmp_path, "sh")
    assert "s3cret" not in native_yaml(translation) + report(translation)
    assert native(translation)["log"]["trackers"] == ["wandb"]


DOMAINS = """\
  ifeval: {worker_cls: roll.rewards.GeneralRuleRewardWorker, tag_included: [ifeval]}
  choice:
    {worker_cls: roll.rewards.CrossThinkQARuleRewardWorker, tag_included: [qa], reward_type: soft,
     response_length_penalty_coef: %s}
"""
REPETITION = {"ngram": 3, "max_penalty": 0.5, "words": "spaces"}


def test_rule_domains_of_roll_score_with_their_verifier_and_the_penalty_for_repetition(
    tmp_path: Path,
) -> None:
    translation = convert("roll", RLVR + DOMAINS % "0.0", tmp_path)
    assert native(translation)["reward"]["sources"] == [
        {"verifier": "math_17k_acc", "tags": ["math"]},
        {"verifier": "ifeval", "tags": ["ifeval"], "options": {"counts_all_words": True}},
        {"verifier": "repetition", "tags": ["ifeval"], "options": REPETITION},
        {"verifier": "crossthinkqa", "tags": ["qa"], "options": {"reward_type": "soft"}},
        {
            "verifier": "repetition",
            "tags": ["qa"],
            "options": REPETITION,
            "name": "choice_repetition",
        },
    ]
    with pytest.raises(MsrlError, match=mentions("response_length_penalty_coef=0.1", "400")):
        convert("roll", RLVR + DOMAINS % "0.1", tmp_path)


JUDGE = """  judge:
    worker_cls: roll.rewards.LLMJudgeRewardWorker
    tag_included: [open]
"""
SERVED = """    judge_model_type: inference
    model_args: {model_name_or_path: org/Judge-7B}
    generating_args: {temperature: 0.8, max_new_tokens: 100}
"""
API = """    judge_model_name: gpt
    judge_api_url: https://judge.example/v1
    judge_api_key: sk-verysecretkey
"""


def test_a_judge_of_roll_is_a_source_with_a_prompt_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("rewards.judge", "language model", "prompt")):
        convert("roll", RLVR + JUDGE + SERVED, tmp_path)
    translation = convert("roll", RLVR + JUDGE + SERVED, tmp_path, approximate=True)
    assert native(translation)["reward"]["sources"][-1] == {
        "judge": "http://127.0.0.1:8000/v1",
        "options": {"model": "Judge-7B", "temperature": 0.8, "max_tokens": 100},
        "tags": ["open"],
    }
    assert_mentions("\n".join(translation.differences), "msrl serve org/Judge-7B")


def test_the_key_of_a_judge_of_roll_is_a_variable(tmp_path: Path) -> None:
    translation = convert("roll", RLVR + JUDGE + API, tmp_path, approximate=True)
    source = native(translation)["reward"]["sources"][-1]
    assert source["judge"] == "https://judge.example/v1"
    assert source["options"]["model"] == "gpt"
    assert source["options"]["headers"] == {"Authorization": "Bearer ${env:JUDGE_API_KEY}"}
    assert "verysecret" not in report(translation) + native_yaml(translation)


def roll_changed(*pairs: tuple[str, str], folder: Path) -> Translation:
    return convert("roll", edit(RLVR, *pairs), folder, approximate=True)


def statuses(translation: Translation) -> dict[str, KeyStatus]:
    return {result.entry.path: result.status for result in translation.key_results}


@pytest.mark.parametrize(
    "option",
    ["use_new_kernel: true", "quantization: fp8", "attention_dropout: 0.1", "kv_cache_dtype: fp8"],
)
def test_options_of_the_engine_and_of_megatron_are_honored_or_refused(
    option: str, tmp_path: Path
) -> None:
    key = "tensor_model_parallel_size: 2"
    with pytest.raises(MsrlError, match=mentions(option.replace(": ", "="), "not supported")):
        roll_changed((key, f"{key}, {option}"), folder=tmp_path)
    translation = roll_changed(("max_steps: 10", "max_steps: 10\nown_label: x"), folder=tmp_path)
    assert statuses(translation)["own_label"] is KeyStatus.DEAD


def test_keys_of_a_domain_without_a_reward_source_are_dropped(tmp_path: Path) -> None:
    worker = "roll.rewards.MathRuleRewardWorker, tag_included: [math]"
    other = "x.OwnRewardWorker, tag_included: [math], infer_batch_size: 4"
    keys = statuses(roll_changed((worker, other), folder=tmp_path))
    assert keys["rewards.math_rule.tag_included"] is KeyStatus.DROPPED
    assert keys["rewards.math_rule.infer_batch_size"] is KeyStatus.PLACEMENT


def test_only_frozen_encoders_of_images_have_no_effect(tmp_path: Path) -> None:
    line = "  infer_batch_size: 4\n"
    frozen = "  model_args: {{freeze_module_prefix: {}}}\n"
    translation = roll_changed((line, frozen.format("vision_model")), folder=tmp_path)
    assert statuses(translation)["actor_train.model_args.freeze_module_prefix"] is KeyStatus.SAME
    with pytest.raises(MsrlError, match=mentions("freeze_module_prefix=lm_head", "train.freeze")):
        roll_changed((line, frozen.format("lm_head")), folder=tmp_path)


def test_rollouts_without_training_are_refused_in_one_line(tmp_path: Path) -> None:
    line = "  device_mapping: list(range(0,16))\n  infer_batch_size: 4\n"
    with pytest.raises(MsrlError, match=mentions("not supported", "device_mapping")) as caught:
        roll_changed((line, ""), folder=tmp_path)
    assert "\n" not in str(caught.value)
