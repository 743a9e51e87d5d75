"""Losses, estimators, KL terms and corrections against the functions of verl and TRL.

B sequences of up to T tokens, padded as the peers do; N unpadded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msrl import registry
from msrl.algorithms.mismatch import Correction, off_policy_mask
from msrl.algorithms.selection import top_share
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.turns import normalized
from msrl.trainer.objective.losses import Outputs, PolicyLoss
from peer_oracle import peer_module, roll_function
from turn_arrays import make_turns

CORE = "verl.trainer.ppo.core_algos"
LENGTHS = (24, 1, 7, 13, 5, 19, 2, 11)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
SPREADS = (0.01, 0.3, 2.0)


@dataclass(frozen=True)
class Batch:
    """Values of B sequences with padding at the end, [B, T] each."""

    mask: Tensor
    old: Tensor
    new: Tensor
    sampler: Tensor
    reference: Tensor
    advantages: Tensor

    def flat(self, values: Tensor) -> Tensor:  # [B, T] -> [N]
        return values[self.mask]

    @property
    def sequences(self) -> Tensor:  # [N]
        return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def weights(self, mode: str) -> Tensor:  # [N]
        lengths = torch.tensor(LENGTHS, dtype=torch.float64)
        divisors = {
            "token-mean": torch.full_like(lengths, float(sum(LENGTHS))),
            "seq-mean-token-mean": lengths * len(LENGTHS),
            "seq-mean-token-sum": torch.full_like(lengths, float(len(LENGTHS))),
        }
        return (1.0 / divisors[mode])[self.sequences]


def make_batch(seed: int, spread: float = 0.3) -> Batch:
    random, shape = np.random.default_rng(seed), (len(LENGTHS), max(LENGTHS))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]

    def near(values: np.ndarray, deviation: float) -> np.ndarray:
        return np.minimum(values + random.normal(0.0, deviation, shape), -1e-3)

    old = near(np.full(shape, -1.5), 0.8)
    arrays = (old, near(old, spread), near(old, 0.3), near(old, 0.5))
    advantages = random.normal(0.0, 1.0, shape)
    return Batch(
        torch.from_numpy(mask), *(torch.from_numpy(a * mask) for a in (*arrays, advantages))
    )


def ours(batch: Batch, mode: str, **settings: Any) -> tuple[float, Tensor]:
    """Return value and gradient [N] of the trainer's loss."""
    leaf = batch.flat(batch.new).clone().requires_grad_()
    fields = {
        "weights": batch.weights(mode),
        "old_logprobs": batch.flat(batch.old),
        "advantages": batch.flat(batch.advantages),
        "draws": torch.zeros(len(leaf)),
    }
    for name in ("sampler", "reference"):
        if settings.pop(name, False):
            fields[f"{name}_logprobs"] = batch.flat(getattr(batch, name))
    loss = PolicyLoss(1.0, **{"clip_low": 0.2, "clip_high": 0.28, **settings})
    value, _ = loss(Outputs(leaf, batch.sequences), fields, len(leaf))
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


def of_verl(batch: Batch, name: str, mode: str, **policy_loss: Any) -> tuple[float, Tensor]:
    """Return value and gradient [N] of verl's policy loss."""
    core = peer_module(CORE)
    config = peer_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2,
        clip_ratio_low=0.2, clip_ratio_high=0.28,
        policy_loss=peer_module("verl.workers.config").PolicyLossConfig(**policy_loss),
    )  # fmt: skip
    leaf = batch.new.clone().requires_grad_()
    value, _ = core.get_policy_loss_fn(name)(
        batch.old, leaf, batch.advantages, batch.mask.double(), mode, config
    )
    value.backward()
    assert leaf.grad is not None
    return value.item(), batch.flat(leaf.grad)


def assert_equal(
    actual: tuple[float, Tensor], expected: tuple[float, Tensor], rtol: float = 1e-6
) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=rtol)
    scale = expected[1].abs().max().item()
    torch.testing.assert_close(actual[1], expected[1], rtol=rtol, atol=rtol * scale)


LOSSES = [
    ("sapo", "sapo", {}, {}),
    ("gpg", "gpg", {}, {}),
    ("dppo", "dppo_tv", {"cap": 3.0}, {}),
    ("dppo", "dppo_kl", {"divergence": "kl", "cap": 3.0}, {}),
    ("clip_cov", "clip_cov", {"share": 1.0, "low": 0.3, "high": 2.0},
     {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0}),
    ("kl_cov", "kl_cov", {"share": 0.1, "coef": 0.7}, {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}),
]  # fmt: skip


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "peer", "options", "theirs"), LOSSES)
def test_losses_equal_those_of_verl(
    name: str, peer: str, options: dict[str, Any], theirs: dict[str, Any], mode: str, spread: float
):
    if name == "sapo" and mode != "seq-mean-token-mean":
        pytest.skip("verl's sapo has one aggregation")
    if name == "dppo":
        newest_core()
    for seed in range(3):
        batch = make_batch(seed, spread)
        got = ours(batch, mode, policy_loss=name, options=options)
        assert_equal(got, of_verl(batch, peer, mode, **theirs), rtol=1e-5)


def newest_core() -> Any:
    """Return verl's functions, or skip the test if they are older than dppo and k1+ (1dda0392)."""
    core = peer_module(CORE)
    if "dppo_tv" not in core.POLICY_LOSS_REGISTRY:
        pytest.skip("this verl is older than 1dda0392")
    return core


def estimate(name: str, rewards: TokenRewards, **arguments: Any) -> np.ndarray:
    package = "msrl.algorithms.advantages"
    return registry.load(package, name, key="").advantages(rewards, **arguments)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("name", "peer", "arguments"),
    [
        ("opo", "opo", {}),
        ("pass_at_k", "grpo_passk", {"eps": 1e-6}),
        ("gpg", "gpg", {"count": "rewards"}),
    ],
)
def test_estimators_equal_those_of_verl(
    name: str, peer: str, arguments: dict[str, Any], binary: bool
):
    core = peer_module(CORE)
    for seed in range(5):
        random, batch = np.random.default_rng(seed), make_batch(seed)
        scores = random.normal(size=(2, 4))
        scores = (scores > 0).astype(np.float64) if binary else scores
        token_scores = torch.zeros_like(batch.old)
        token_scores[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1] = torch.from_numpy(
            scores.ravel()
        )
        expected, _ = core.get_adv_estimator_fn(peer)(
            token_level_rewards=token_scores,
            response_mask=batch.mask.double(),
            index=np.repeat(np.arange(2), 4),
            config=SimpleNamespace(get=lambda key, default: default),
        )
        rewards = TokenRewards(scores, np.array(LENGTHS).reshape(2, 4))
        got = estimate(name, rewards, **arguments)
        np.testing.assert_allclose(got, batch.flat(expected).numpy(), rtol=1e-6, atol=1e-7)


def test_remax_equals_that_of_verl():
    core = peer_module(CORE)
    for seed in range(5):
        batch, random = make_batch(seed), np.random.default_rng(seed)
        token_rewards = torch.from_numpy(random.normal(size=batch.old.shape)) * batch.mask
        greedy = random.normal(size=2)
        expected, _ = core.get_adv_estimator_fn("remax")(
            token_level_rewards=token_rewards,
            reward_baselines=torch.from_numpy(np.repeat(greedy, 4)),
            response_mask=batch.mask.double(),
        )
        lengths = np.array(LENGTHS).reshape(2, 4)
        rewards = TokenRewards(np.zeros((2, 4)), lengths, batch.flat(token_rewards).numpy())
        got = estimate("remax", rewards, greedy_rewards=greedy)
        np.testing.assert_allclose(got, batch.flat(expected).numpy(), rtol=1e-6, atol=1e-7)


def test_the_optimal_token_baseline_equals_that_of_verl():
    core = newest_core()
    for seed in range(5):
        batch, random = make_batch(seed), np.random.default_rng(seed)
        token_rewards = torch.from_numpy(random.normal(size=batch.old.shape)) * batch.mask
        squares = torch.from_numpy(random.uniform(0, 1, batch.old.shape))
        expected, _ = core.get_adv_estimator_fn("optimal_token_baseline")(
            token_level_rewards=token_rewards,
            response_mask=batch.mask.double(),
            index=np.repeat(np.arange(2), 4),
            old_log_probs=batch.old,
            sum_pi_squared=squares,
        )
        lengths = np.array(LENGTHS).reshape(2, 4)
        rewards = TokenRewards(np.zeros((2, 4)), lengths, batch.flat(token_rewards).numpy())
        got = estimate(
            "optimal_token_baseline",
            rewards,
            logprobs=batch.flat(batch.old).numpy(),
            squared_probabilities=batch.flat(squares).numpy(),
        )
        np.testing.assert_allclose(got, batch.flat(expected).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_tokens_of_highest_entropy_equal_those_of_trl(share: float):
    trainer = peer_module("trl.trainer.grpo_trainer").GRPOTrainer
    accelerator = SimpleNamespace(
        pad_across_processes=lambda x, dim, pad_index: x, gather=lambda x: x
    )
    for seed in range(3):
        batch = make_batch(seed)
        entropies = torch.from_numpy(np.random.default_rng(seed).gamma(1.0, size=batch.old.shape))
        expected = trainer.get_high_entropy_mask(
            SimpleNamespace(accelerator=accelerator), entropies, batch.mask, 1 - share
        )
        got = top_share(batch.flat(entropies).float().double().numpy(), share)
        assert got.tolist() == batch.flat(expected).tolist()


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_kl_terms_with_the_gradient_of_k2_equal_those_of_verl(estimator: str):
    core = newest_core()
    for seed in range(3):
        batch = make_batch(seed)
        settings = {"kl_coef": 1.0, "kl_estimator": estimator, "reference": True}
        whole = ours(batch, "token-mean", policy_loss="gpg", **settings)
        policy = ours(batch, "token-mean", policy_loss="gpg")
        leaf = batch.new.clone().requires_grad_()
        values = core.kl_penalty(leaf, batch.reference, estimator)
        value = (values * batch.mask).sum() / batch.mask.sum()
        value.backward()
        assert leaf.grad is not None
        expected = (value.item() + policy[0], batch.flat(leaf.grad) + policy[1])
        assert_equal(whole, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [True, False])
def test_importance_weights_equal_those_of_verl(level: str, normalize: bool):
    helper = peer_module("verl.trainer.ppo.rollout_corr_helper")
    for seed in range(3):
        batch = make_batch(seed)
        expected, _ = helper.compute_rollout_correction_weights(
            log_ratio=batch.old - batch.sampler,
            response_mask=batch.mask.double(),
            rollout_is=level,
            rollout_is_threshold=1.5,
            rollout_is_batch_normalize=normalize,
        )
        correction = Correction(weight=level, upper=1.5)  # type: ignore[arg-type]
        old, sampler = batch.flat(batch.old), batch.flat(batch.sampler)
        if normalize:
            mean = correction.mean_weight(old, sampler, batch.sequences)
            correction = replace(correction, scale=1.0 / mean)
        got, _ = correction(old, sampler, torch.ones_like(old).bool(), batch.sequences)
        torch.testing.assert_close(got, batch.flat(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("level", "option", "bounds"),
    [
        ("token", "token_k1", (0.8, 1.2)),
        ("sequence", "seq_mean_k1", (0.97, 1.05)),
        ("sequence-product", "seq_sum_k1", (0.4, 2.2)),
    ],
)
def test_filters_equal_those_of_verl(level: str, option: str, bounds: tuple[float, float]):
    """verl bounds the inverse ratio."""
    helper = peer_module("verl.trainer.ppo.rollout_corr_helper")
    for seed in range(3):
        batch = make_batch(seed)
        low, high = bounds
        expected, _ = helper.compute_rollout_rejection_mask(
            batch.old - batch.sampler,
            batch.mask.double(),
            rollout_rs=option,
            rollout_rs_threshold=f"{1 / high}_{1 / low}",
        )
        correction = Correction(filter=level, low=low, high=high)  # type: ignore[arg-type]
        old = batch.flat(batch.old)
        got, _ = correction(
            old, batch.flat(batch.sampler), torch.ones_like(old).bool(), batch.sequences
        )
        assert got.tolist() == batch.flat(expected).tolist() and 0 < got.sum() < len(got)


def test_the_off_policy_mask_equals_that_of_trl():
    trainer = peer_module("trl.trainer.grpo_trainer").GRPOTrainer
    for seed in range(5):
        batch = make_batch(seed)
        advantages = batch.advantages[:, :1]
        keep = trainer.get_off_policy_mask(
            advantages, batch.new, batch.sampler, batch.mask.double(), 0.05
        )
        flat = batch.flat(advantages.expand_as(batch.new))
        ones = torch.ones_like(flat).bool()
        dropped = off_policy_mask(
            batch.flat(batch.new),
            batch.flat(batch.sampler),
            flat,
            ones,
            batch.sequences,
            limit=0.05,
        )
        expected = batch.flat(keep.expand_as(batch.new) == 0)
        assert dropped.tolist() == expected.tolist() and dropped.any()


class RollBatch:
    """Rows with the methods of ROLL's DataProto that its normalization calls."""

    def __init__(self, batch: Any, keys: dict[str, np.ndarray]) -> None:
        self.batch, self.keys = batch, keys

    def group_by(self, keys: str) -> dict[str, RollBatch]:
        groups: dict[str, RollBatch] = {}
        for key in dict.fromkeys(self.keys[keys].tolist()):
            rows = self.keys[keys] == key
            batch = _RollTensors({name: value[rows] for name, value in self.batch.items()})
            own = {name: values[rows] for name, values in self.keys.items()}
            groups[str(key)] = RollBatch(batch, own)
        return groups

    def reorder(self, indices: Tensor) -> None:
        self.batch = _RollTensors({name: value[indices] for name, value in self.batch.items()})

    def pop(self, name: str) -> None:
        del self.batch[name]

    @staticmethod
    def concat(batches: list[RollBatch]) -> RollBatch:
        names = batches[0].batch
        batch = {name: torch.cat([rows.batch[name] for rows in batches]) for name in names}
        return RollBatch(_RollTensors(batch), {})


class _RollTensors(dict[str, Tensor]):
    @property
    def batch_size(self) -> tuple[int]:
        return (len(next(iter(self.values()))),)

    device = None


@pytest.mark.parametrize("scope", ["batch", "tag", "group", "state"])
@pytest.mark.parametrize("types", [("group", None), ("group", "group"), ("batch", "group")])
def test_normalization_of_turns_equals_that_of_roll(scope: str, types: tuple[str, str | None]):
    function = roll_function(
        "roll/pipeline/agentic/utils.py",
        "agentic_reward_norm",
        {"torch": torch, "DataProto": RollBatch},
    )
    source = np.random.default_rng(3)
    counts, tags = source.integers(1, 5, (6, 4)), np.array([0, 1, 0, 2, 1, 0])
    num_turns = int(counts.sum())
    states = source.integers(0, 3, num_turns)
    turns = make_turns(counts, [1] * num_turns, states, tags)
    values = source.normal(size=num_turns)
    labels = turns.labels(scope)
    batch = RollBatch(_RollTensors({"scores": torch.tensor(values)}), {"scope": labels.astype(str)})
    mean_type, std_type = types
    grouping = "batch" if scope == "batch" else "scope"
    settings = {"grouping": grouping, "norm_mean_type": mean_type, "norm_std_type": std_type}
    expected = function(batch, SimpleNamespace(**settings)).numpy()
    everything = np.zeros(num_turns, np.int64)
    got = normalized(
        values,
        center=everything if mean_type == "batch" else labels,
        scale=None if std_type is None else labels,
        eps=1e-6,
        among=np.ones(num_turns, np.bool_),
    )
    np.testing.assert_allclose(got, expected, atol=1e-6)
