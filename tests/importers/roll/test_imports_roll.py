"""Imported ROLL files have the losses and advantages of ROLL's own functions.

P prompts with G samples of up to T tokens; N tokens of all responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import roll_oracle as oracle
from imported_steps import loss_and_gradient, scored_groups, step_advantages
from msrl.config.schema import Config
from msrl.errors import MsrlError
from support import mentions
from test_imports_commands import RLVR, edit
from test_imports_losses import PG, convert, native

PROMPT = 2  # tokens of every prompt
LENGTHS = (24, 1, 7, 13, 5, 19, 2, 11)
GROUP = 4
FILE = edit(RLVR, ("num_return_sequences_in_group: 8", f"num_return_sequences_in_group: {GROUP}"))
LOSSES: dict[str, tuple[list[str], str]] = {
    "ppo": ([], ""),
    "a clip range": (["use_pg_clip_range: true", "pg_clip_low: 0.1", "pg_clip_high: 0.3"], ""),
    "a clip": (["pg_clip: 0.3"], ""),
    "a dual clip": (["dual_clip_loss: true", "pg_clip: 0.1"], ""),
    "a ratio of sequences": (["importance_sampling: seq"], ""),
    "coefficients": (["rl_loss_coef: 0.5", "kl_loss_coef: 0.3"], ""),
    "no KL": (["use_kl_loss: false"], ""),
    "an entropy bonus": (["entropy_loss_coef: 0.1"], ""),
    "token-mean": (["loss_agg_mode: token-mean"], ""),
    "seq-mean-token-sum": (["loss_agg_mode: seq-mean-token-sum"], ""),
    "seq-mean-token-mean": (["loss_agg_mode: seq-mean-token-mean"], ""),
    "seq-mean-token-sum-norm": (["loss_agg_mode: seq-mean-token-sum-norm"], ""),
    **{
        f"pg worker, {variant}": ([], f"{PG}  pg_variant: {variant}\n")
        for variant in ("vanilla", "ppo", "tis", "topr", "cispo")
    },
}
ADVANTAGES: dict[str, list[str]] = {
    "grpo": [],
    "grpo, whitened": ["whiten_advantages: true"],
    "grpo, clipped rewards": ["reward_clip: 0.7"],
    "grpo, clipped advantages": ["advantage_clip: 0.7", "whiten_advantages: true"],
    "grpo, discounted": ["gamma: 0.9"],
    "grpo, whitened rewards": ["whiten_rewards: true"],
    "grpo, a penalty of kl": [
        "add_token_level_kl: true",
        "kl_penalty: kl",
        "init_kl_coef: 0.3",
        "kl_horizon: 10000",
    ],
    "reinforce": ["adv_estimator: reinforce"],
    "reinforce, discounted": ["adv_estimator: reinforce", "gamma: 0.9"],
    "reinforce, clipped rewards": ["adv_estimator: reinforce", "reward_clip: 0.5"],
    "reinforce, whitened rewards": ["adv_estimator: reinforce", "whiten_rewards: true"],
    "reinforce, batch": [
        "adv_estimator: reinforce",
        "norm_mean_type: batch",
        "norm_std_type: batch",
    ],
    "reinforce, group mean": ["adv_estimator: reinforce", "norm_mean_type: group"],
    "reinforce, group mean and batch deviation": [
        "adv_estimator: reinforce",
        "norm_mean_type: group",
        "norm_std_type: batch",
    ],
    **{
        f"a penalty of {kind}": [
            "adv_estimator: reinforce",
            "add_token_level_kl: true",
            f"kl_penalty: {kind}",
            "init_kl_coef: 0.3",
            "kl_horizon: 10000",
        ]
        for kind in ("kl", "abs", "mse", "k3")
    },
}


def file_with(lines: list[str], worker: str = "") -> str:
    """Return the file with top-level lines that replace the lines of the same key."""
    keys = {line.split(":")[0] for line in lines}
    unchanged = [line for line in FILE.splitlines() if line.split(":")[0] not in keys]
    text = "\n".join([*unchanged, *lines]) + "\n"
    return edit(text, ("  infer_batch_size: 4\n", worker)) if worker else text


def pipeline(lines: list[str], worker: str = "") -> Any:
    """Return the configuration of ROLL's pipeline for the same file."""
    values: dict[str, Any] = {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.002}
    for line in lines:
        key, _, value = line.partition(": ")
        values[key] = (
            {"true": True, "false": False}.get(value)
            if value in ("true", "false")
            else (float(value) if value.replace(".", "").isdigit() else value)
        )
    variant = worker.rpartition("pg_variant: ")[2].strip()
    return oracle.pipeline_config(
        GROUP, **values, actor_train={"pg_variant": variant} if variant else {}
    )


def roll_batch(seed: int) -> oracle.Batch:
    """Return the padded tensors of a step, [B, S] or [B, S - 1]."""
    random, width = torch.Generator().manual_seed(seed), PROMPT + max(LENGTHS)
    lengths, position = torch.tensor(LENGTHS)[:, None], torch.arange(width)[None]
    attention = position < PROMPT + lengths
    response = attention & (position >= PROMPT)

    def logprobs(base: Tensor | float, deviation: float) -> Tensor:
        noise = torch.randn(len(LENGTHS), width - 1, generator=random, dtype=torch.float64)
        return (base + deviation * noise).clamp(max=-1e-3) * response[:, 1:]

    old = logprobs(-1.5, 0.8)
    rewards = torch.randint(0, 2, (len(LENGTHS),), generator=random).double()
    return oracle.Batch(
        input_ids=attention.long(),
        attention_mask=attention.long(),
        position_ids=position.expand(len(LENGTHS), -1).clone(),
        response_mask=response.long(),
        old_log_probs=old,
        ref_log_probs=logprobs(old, 0.5),
        log_probs=logprobs(old, 0.3),
        response_level_rewards=rewards + torch.arange(len(LENGTHS)) / 7,
        scores=rewards,
        train_infer_is_weight=torch.ones_like(old),
        values=logprobs(0.0, 0.5),
    )


def flat(batch: oracle.Batch, values: Tensor) -> Tensor:  # [B, S - 1] -> [N]
    return values[batch["response_mask"][:, 1:].bool()]


def our_loss(config: Config, batch: oracle.Batch, entropy: Tensor) -> tuple[float, Tensor]:
    """Return value and gradient [N] of the loss of an imported file."""
    fields = {
        "old_logprobs": flat(batch, batch["old_log_probs"]),
        "reference_logprobs": flat(batch, batch["ref_log_probs"]),
        "advantages": flat(batch, batch["advantages"]),
        "scores": batch["scores"].repeat_interleave(torch.tensor(LENGTHS)),
    }
    logprobs, entropies = flat(batch, batch["log_probs"]), flat(batch, entropy)
    return loss_and_gradient(config, LENGTHS, logprobs, entropies, fields)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_imported_file_is_that_of_the_worker(name: str, tmp_path: Path) -> None:
    lines, worker = LOSSES[name]
    theirs = pipeline(lines, worker)
    config = Config.model_validate(native(convert("roll", file_with(lines, worker), tmp_path)))
    for seed in range(3):
        batch = roll_batch(seed)
        mask = batch["response_mask"][:, 1:]
        signs = (2 * batch["scores"] - 1)[:, None].double()  # of one sample, as the group's
        batch["advantages"] = signs * mask
        entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
        leaf = batch["log_probs"].clone().requires_grad_()
        expected = oracle.loss(theirs, batch, leaf, entropy, is_pg_worker=bool(worker))
        expected.backward()
        assert leaf.grad is not None
        value, gradient = our_loss(config, batch, entropy)
        width = mask.shape[1] / (1024 + 2048 - 1) if name == "seq-mean-token-sum-norm" else 1.0
        torch.testing.assert_close(gradient, width * flat(batch, leaf.grad), rtol=1e-6, atol=1e-9)
        if width == 1.0:
            assert value == pytest.approx(expected.item(), rel=1e-6)


def test_topr_is_that_of_roll_where_scores_and_advantages_have_other_signs(tmp_path: Path) -> None:
    lines, worker = LOSSES["pg worker, topr"]
    config = Config.model_validate(native(convert("roll", file_with(lines, worker), tmp_path)))
    batch = roll_batch(0)
    mask = batch["response_mask"][:, 1:]
    batch["advantages"] = (1 - 2 * batch["scores"])[:, None] * mask
    leaf = batch["log_probs"].clone().requires_grad_()
    theirs = pipeline(lines, worker)
    oracle.loss(theirs, batch, leaf, torch.zeros_like(leaf), is_pg_worker=True).backward()
    _, gradient = our_loss(config, batch, torch.zeros_like(leaf))
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, flat(batch, leaf.grad), rtol=1e-6, atol=1e-9)


def our_advantages(
    config: Config, batch: oracle.Batch, tags: Sequence[str] = ("math", "math")
) -> np.ndarray:  # [N]
    """Return the advantages of a step, as the driver computes them from scores."""
    groups = scored_groups(batch["response_level_rewards"], LENGTHS, tags)
    names = ("old_log_probs", "ref_log_probs", "values")
    return step_advantages(config, groups, *(flat(batch, batch[name]) for name in names))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_an_imported_file_are_those_of_the_pipeline(
    name: str, tmp_path: Path
) -> None:
    theirs = pipeline(ADVANTAGES[name])
    text = file_with(ADVANTAGES[name])
    config = Config.model_validate(native(convert("roll", text, tmp_path)))
    for seed in range(3):
        batch = roll_batch(seed)
        actual = our_advantages(config, batch)
        expected = flat(batch, oracle.advantages(theirs, batch)).numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


TWO_DOMAINS = "  qa: {worker_cls: roll.rewards.MathRuleRewardWorker, tag_included: [qa]}\n"
BY_DOMAIN: dict[str, list[str]] = {
    "grpo, whitened": ["whiten_advantages: true"],
    "grpo, clipped and whitened": ["reward_clip: 0.7", "whiten_advantages: true"],
    "reinforce, whitened": ["adv_estimator: reinforce", "whiten_advantages: true"],
    "reinforce, whitened rewards": ["adv_estimator: reinforce", "whiten_rewards: true"],
    "reinforce, batch": ADVANTAGES["reinforce, batch"],
}


@pytest.mark.parametrize("name", BY_DOMAIN)
def test_the_samples_of_each_domain_are_normalized_by_themselves(name: str, tmp_path: Path) -> None:
    text = file_with(BY_DOMAIN[name])
    text = edit(text, ("rewards:\n", f"rewards:\n{TWO_DOMAINS}"))
    translation = convert("roll", text, tmp_path)
    config = Config.model_validate(native(translation))
    batch = roll_batch(0)
    rows = [slice(0, GROUP), slice(GROUP, None)]  # one prompt of each domain
    theirs = pipeline(BY_DOMAIN[name])
    parts = [oracle.Batch({key: value[part] for key, value in batch.items()}) for part in rows]
    tokens = [oracle.advantages(theirs, part) for part in parts]
    expected = flat(batch, torch.cat(tokens)).numpy()
    actual = our_advantages(config, batch, ("math", "qa"))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_mean_of_the_run_with_several_domains_is_refused(tmp_path: Path) -> None:
    text = edit(
        RLVR,
        ("rewards:\n", f"rewards:\n{TWO_DOMAINS}"),
        ("adv_estimator: grpo", "adv_estimator: reinforce"),
    )
    text += "norm_mean_type: running\n"
    with pytest.raises(MsrlError, match=mentions("norm_mean_type=running", "domains")):
        convert("roll", text, tmp_path)


def test_arguments_that_roll_passes_to_vllm_follow_the_list_of_engine_options(
    tmp_path: Path,
) -> None:
    old = "max_model_len: 8000}"
    text = edit(RLVR, (old, "max_model_len: 8000, attention_backend: FLASH_ATTN}"))
    engine = native(convert("roll", text, tmp_path, "yaml"))["rollout"]["engine"]
    assert engine["options"] == {"attention_backend": "FLASH_ATTN"}
    text = edit(RLVR, (old, "max_model_len: 8000, kv_cache_dtype: fp8}"))
    with pytest.raises(MsrlError, match=mentions("kv_cache_dtype=fp8", "not tried")):
        convert("roll", text, tmp_path, "yaml")
