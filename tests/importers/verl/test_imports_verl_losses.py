"""Imported verl scripts have the losses, advantages and scores of verl's own functions.

P prompts with G samples of up to T tokens; N tokens of all responses.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import verl_oracle as oracle
from imported_steps import loss_and_gradient, scored_groups, step_advantages
from msrl.algorithms.aggregate import sequence_weights
from msrl.config.schema import Config
from msrl.plan.derived import aggregate_constant
from msrl.rewards.verifiers import verl as scores
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.schedule import Schedule
from test_imports_losses import native
from test_imports_verl import imported_script

LENGTHS = (24, 1, 7, 13, 5, 19, 2, 11)
GROUP = 4
ACTOR, ALGORITHM = "actor_rollout_ref.actor", "algorithm"
CORRECTION = f"{ALGORITHM}.rollout_correction"
BASE = [
    f"{ALGORITHM}.adv_estimator=grpo",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "data.train_batch_size=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
]
GSPO = [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]
KL_LOSS = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.3"]
LOSSES: dict[str, list[str]] = {
    "ppo": [],
    "a clip range": [f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.28"],
    "a clip, which is not read": [f"{ACTOR}.clip_ratio=0.05"],
    "a clip for null": [
        f"{ACTOR}.clip_ratio=0.05",
        f"{ACTOR}.clip_ratio_low=null",
        f"{ACTOR}.clip_ratio_high=null",
    ],
    "a dual clip": [f"{ACTOR}.clip_ratio_c=1.5"],
    "an entropy bonus": [f"{ACTOR}.entropy_coeff=0.1"],
    **{
        f"a KL loss, {kind}": [*KL_LOSS, f"{ACTOR}.kl_loss_type={kind}"]
        for kind in ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+", "mse+")
    },
    **{
        mode: [f"{ACTOR}.loss_agg_mode={mode}", *KL_LOSS, f"{ACTOR}.entropy_coeff=0.1"]
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    "seq-mean-token-sum-norm": [
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor=100",
    ],
    "gspo": [*GSPO, f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
    "gspo with its own average": [f"{ACTOR}.policy_loss.loss_mode=gspo"],
    "gspo with a KL loss": [*GSPO, *KL_LOSS],
    "sapo": [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.5"],
    "gpg": [f"{ACTOR}.policy_loss.loss_mode=gpg"],
    "cispo": [
        f"{ACTOR}.policy_loss.loss_mode=cispo",
        f"{ACTOR}.clip_ratio_low=10",
        f"{ACTOR}.clip_ratio_high=0.2",
    ],
    "dppo_tv": [f"{ACTOR}.policy_loss.loss_mode=dppo_tv"],
    "dppo_kl": [f"{ACTOR}.policy_loss.loss_mode=dppo_kl", f"{ACTOR}.clip_ratio_c=20"],
    "kl_cov": [
        f"{ACTOR}.policy_loss.loss_mode=kl_cov",
        f"{ACTOR}.policy_loss.kl_cov_ratio=0.1",
    ],
    "clip_cov": [
        f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        f"{ACTOR}.policy_loss.clip_cov_ratio=1.0",
        f"{ACTOR}.policy_loss.clip_cov_lb=0.3",
    ],
    "geo_mean": [f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
    "weights of tokens": [f"{CORRECTION}.rollout_is=token"],
    "weights of sequences": [
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_threshold=1.5",
    ],
    "bounds of tokens": [
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=0.8_1.3",
    ],
    "bounds of sequences": [
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_threshold=0.3_1.9",
    ],
}
ADVANTAGES: dict[str, list[str]] = {
    "grpo": [],
    "grpo without deviation": [f"{ALGORITHM}.norm_adv_by_std_in_grpo=False"],
    "grpo with a KL penalty": [
        f"{ALGORITHM}.use_kl_in_reward=True",
        f"{ALGORITHM}.kl_ctrl.kl_coef=0.3",
    ],
    **{
        f"reinforce_plus_plus with a penalty of {kind}": [
            f"{ALGORITHM}.adv_estimator=reinforce_plus_plus",
            f"{ALGORITHM}.gamma=0.95",
            f"{ALGORITHM}.use_kl_in_reward=True",
            f"{ALGORITHM}.kl_ctrl.kl_coef=0.3",
            f"{ALGORITHM}.kl_penalty={kind}",
        ]
        for kind in ("kl", "abs", "mse", "low_var_kl", "k3+")
    },
    **{
        name: [f"{ALGORITHM}.adv_estimator={name}"]
        for name in (
            "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "grpo_passk", "gpg",
            "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        )
    },
    "grpo_passk without deviation": [
        f"{ALGORITHM}.adv_estimator=grpo_passk",
        f"{ALGORITHM}.norm_adv_by_std_in_grpo=False",
    ],
    "gae": [f"{ALGORITHM}.adv_estimator=gae"],
    "gae with a discount": [
        f"{ALGORITHM}.adv_estimator=gae",
        f"{ALGORITHM}.gamma=0.98",
        f"{ALGORITHM}.lam=0.9",
    ],
}  # fmt: skip


def config_of(lines: list[str], folder: Path) -> Config:
    """Return the native configuration of a script with these changes."""
    return Config.model_validate(native(imported_script([*BASE, *lines], folder, approximate=True)))


def verl_batch(seed: int) -> oracle.Batch:
    """Return the padded tensors of a step, [B, T]."""
    generator, shape = torch.Generator().manual_seed(seed), (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]

    def logprobs(base: Tensor | float, deviation: float) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (base + deviation * noise).clamp(max=-1e-3) * mask

    old = logprobs(-1.5, 0.8)
    rewards = torch.randint(0, 2, (len(LENGTHS),), generator=generator).double()
    token_scores = torch.zeros(shape, dtype=torch.float64)
    last = torch.tensor(LENGTHS) - 1
    token_scores[torch.arange(len(LENGTHS)), last] = rewards + torch.arange(len(LENGTHS)) / 7
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return oracle.Batch(
        response_mask=mask.long(),
        old_log_probs=old,
        ref_log_prob=logprobs(old, 0.5),
        log_probs=logprobs(old, 0.3),
        rollout_log_probs=logprobs(old, 0.3),
        token_level_scores=token_scores,
        values=logprobs(0.0, 0.5),
        advantages=advantages[:, None] * mask,
    )


def flat(batch: oracle.Batch, values: Tensor) -> Tensor:  # [B, T] -> [N]
    return values[batch["response_mask"].bool()]


def our_loss(config: Config, batch: oracle.Batch, entropy: Tensor) -> tuple[float, Tensor]:
    """Return value and gradient [N] of the loss of an imported script."""
    logprobs, entropies = flat(batch, batch["log_probs"]), flat(batch, entropy)
    fields = {
        "old_logprobs": flat(batch, batch["old_log_probs"]),
        "sampler_logprobs": flat(batch, batch["rollout_log_probs"]),
        "reference_logprobs": flat(batch, batch["ref_log_prob"]),
        "advantages": flat(batch, batch["advantages"]),
        "draws": torch.zeros(len(logprobs)),
    }
    return loss_and_gradient(config, LENGTHS, logprobs, entropies, fields)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_imported_script_is_that_of_the_actor(name: str, tmp_path: Path) -> None:
    theirs = oracle.config(oracle.changes([*BASE, *LOSSES[name]]))
    config = config_of(LOSSES[name], tmp_path)
    for seed in range(3):
        batch = verl_batch(seed)
        entropy = torch.rand(
            batch["log_probs"].shape, generator=torch.Generator().manual_seed(seed)
        )
        leaf = batch["log_probs"].clone().requires_grad_()
        expected = oracle.loss(theirs, oracle.correct(theirs, batch), leaf, entropy)
        expected.backward()
        assert leaf.grad is not None
        value, gradient = our_loss(config, batch, entropy)
        assert value == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient, flat(batch, leaf.grad), rtol=1e-5, atol=1e-8)


def our_advantages(config: Config, batch: oracle.Batch) -> np.ndarray:  # [N]
    """Return the advantages of a step, as the driver computes them from scores."""
    groups = scored_groups(batch["token_level_scores"].sum(-1), LENGTHS, ("", ""))
    names = ("old_log_probs", "ref_log_prob", "values")
    return step_advantages(config, groups, *(flat(batch, batch[name]) for name in names))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_an_imported_script_are_those_of_the_trainer(
    name: str, tmp_path: Path
) -> None:
    theirs = oracle.config(oracle.changes([*BASE, *ADVANTAGES[name]]))
    config = config_of(ADVANTAGES[name], tmp_path)
    labels = np.repeat(np.arange(len(LENGTHS) // GROUP), GROUP)
    for seed in range(3):
        batch = verl_batch(seed)
        expected = flat(batch, oracle.advantages(theirs, batch, labels)).numpy()
        actual = our_advantages(config, batch)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "aggregation",
    [
        [],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "critic.loss_agg_mode=seq-mean-token-mean"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=7"],
        [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
    ],
)
def test_the_value_loss_of_an_imported_script_is_that_of_the_critic(
    aggregation: list[str], tmp_path: Path
) -> None:
    lines = [f"{ALGORITHM}.adv_estimator=gae", "critic.cliprange_value=0.3", *aggregation]
    theirs = oracle.config(oracle.changes([*BASE, *lines]))
    config = config_of(lines, tmp_path)
    batch = verl_batch(0)
    batch["returns"] = batch["rollout_log_probs"]
    leaf = batch["ref_log_prob"].clone().requires_grad_()
    oracle.value_loss(theirs, leaf, batch).backward()
    ours = flat(batch, batch["ref_log_prob"]).clone().requires_grad_()
    mode, constant = config.algo.value.aggregate, aggregate_constant(config)
    weights = torch.from_numpy(sequence_weights(LENGTHS, mode, constant=constant))
    fields = {
        "weights": torch.repeat_interleave(weights, torch.tensor(LENGTHS)),
        "old_values": flat(batch, batch["values"]),
        "returns": flat(batch, batch["returns"]),
    }
    loss, _ = ValueLoss(config.algo.value.clip)(ours, fields, len(ours))
    loss.backward()
    assert leaf.grad is not None and ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), flat(batch, leaf.grad), rtol=1e-5, atol=1e-8)


# --- Scores ---

_PIECES = (
    "\\boxed{", "}", "{", "\\frac", "1", "2", "x", "\\sqrt", "3", " ", "$", "=", "\\text{ ",
    "\\text{", "cm", "\\left", "\\right", "(", ")", ".", ",", "0.5", "/", "-", "#### ",
    "Answer: ", "answer :", "\n", "\\boxed ", "\\fbox{", "\\\\", "\\!", "%", "\\%", "^\\circ",
    "a ", "tfrac", "\\dfrac", "\\overline{", "\\textbf{", "\\mbox{", "10", "07", "and", "{,}",
)  # fmt: skip


def _text(source: random.Random, length: int) -> str:
    return "".join(source.choice(_PIECES) for _ in range(source.randint(0, length)))


def test_the_scores_of_data_sources_are_those_of_verl() -> None:
    modules = {
        "gsm8k": oracle.score_module("gsm8k"),
        "math": oracle.score_module("math_reward"),
        "math_dapo": oracle.score_module("math_dapo"),
    }
    source, num_right = random.Random(1), dict.fromkeys(modules, 0)
    for _ in range(5000):
        answer = _text(source, 3)
        response = _text(source, 8)
        claimed = source.choice((answer, _text(source, 3)))
        response += source.choice(("Answer: {}", "\\boxed{{{}}}", "#### {}", "{}")).format(claimed)
        for kind, module in modules.items():
            with contextlib.redirect_stdout(io.StringIO()):
                result: Any = module.compute_score(response, answer)
            expected = float(result["score"] if isinstance(result, dict) else result)
            actual = scores.score(response, answer, kind=kind)  # type: ignore[arg-type]
            assert actual == expected, (kind, response, answer)
            num_right[kind] += expected == 1.0
    assert all(count > 20 for count in num_right.values()), num_right


# --- Learning rates ---


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_the_rates_of_steps_with_one_update_are_those_of_verl(kind: str, tmp_path: Path) -> None:
    num_steps, warmup = 12, 4
    lines = [
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.optim.lr_warmup_steps={warmup}",
        f"{ACTOR}.optim.lr_scheduler_type={kind}",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
    ]
    translation = imported_script([*BASE, *lines], tmp_path)
    config = Config.model_validate(native(translation))
    ours = Schedule.of(config.train.optimizer, num_steps)
    oracle.checkout()
    module = importlib.import_module("verl.utils.torch_functional")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    make = getattr(module, f"get_{kind}_schedule_with_warmup")
    arguments: dict[str, Any] = {"num_warmup_steps": warmup}
    if kind == "cosine":
        arguments |= {"num_training_steps": num_steps, "min_lr_ratio": 0.1}
    theirs = make(optimizer=optimizer, **arguments)
    for step in range(num_steps):
        assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        theirs.step()
