"""What a training rank is told. Light to import: the process that starts the ranks makes these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from msrl.models.parallel_layout import ParallelLayout
from msrl.models.reward_head import BIAS
from msrl.models.shape import Shape
from msrl.types import ChatFormat


@dataclass(frozen=True, slots=True)
class Layout(ParallelLayout):
    """How a model and its sequences are cut while it trains: a cut; whether norms are cut along the sequence (`sp`); `cp` ranks share the
    tokens of every sequence.
    """

    sp: bool = False
    cp: int = 1

    @property
    def replica_size(self) -> int:
        """Ranks that train one copy of the model; the rest of a world is data parallel."""
        return self.ranks_per_replica(self.cp)


def sequence_multiple(layout: Layout, shape: Shape) -> int:
    """What the tokens of a micro-batch must be a multiple of: sequence parallelism cuts them over the tensor-parallel ranks.

    Megatron's mixtures of experts need it wherever there is tensor parallelism.
    """
    return layout.tp if layout.sp or shape.moe is not None else 1


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (arXiv:1711.05101); biases and norms are not decayed."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float | None = 1.0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activations that are made again in the backward pass instead of kept (Megatron's settings of these names)."""

    granularity: Literal["full", "selective"]
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters that are trained in place of the model; targets are layers by Megatron's or Hugging Face's names."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """What the critic has of its own: the weights that it starts from (see `trainer.critic`), and its optimizer."""

    model: Path
    hf_dir: Path | None
    optimizer: OptimizerSettings


@dataclass(frozen=True, slots=True)
class Balance:
    """What keeps experts in use (`trainer/balance.py`); the coefficients multiply each layer's loss."""

    aux_loss_coef: float = 0.0
    over: Literal["sequence", "micro_batch"] = "sequence"  # the tokens among which the load is to be balanced
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every rank of a training run is told. `optimizer` None: forward passes only."""

    platform: str
    model: Path  # Hugging Face folder, or mcore checkpoint of any layout
    layout: Layout
    dtype: str
    seed: int
    timeout_s: float
    iteration: int | None = None  # of an mcore checkpoint; None: its latest
    hf_dir: Path | None = None  # with config.json, for an mcore checkpoint that brings none
    optimizer: OptimizerSettings | None = None
    reference: Path | None = None
    deterministic: bool = False  # refuse operations whose result may differ from run to run
    freeze: tuple[str, ...] = ()  # patterns of names, as `models/select.py` reads them
    max_skipped: int = 3  # updates in a row with a gradient that is not finite; the last ends the run
    bad_batch_dir: Path | None = None  # where the batch of that last one is written
    recompute: Recompute | None = None
    lora: Lora | None = None
    chunk: int | None = None  # positions whose logits exist at once; None: those of a micro-batch
    balance: Balance | None = None
    offload: frozenset[str] = frozenset()  # of "optimizer", "grads", "params": what waits on the host
    critic: CriticSettings | None = None
    chat: ChatFormat | None = None  # how the model will have learnt to be asked; its checkpoints say so
    reward_models: Mapping[str, Path] = field(default_factory=dict[str, Path])  # by the names of their reward sources

    def of_reward_model(self, name: str) -> WorkerSettings:
        """The same for a reward model, which only scores."""
        return replace(
            self, model=self.reward_models[name], hf_dir=None, optimizer=None,
            iteration=None, reference=None, freeze=(), lora=None, chunk=None, recompute=None, critic=None, reward_models={},
        )  # fmt: skip

    def of_critic(self, critic: CriticSettings) -> WorkerSettings:
        """The same for the critic, which is trained whole but for its head's bias: transformers' score heads have none."""
        folder = self.bad_batch_dir / "critic" if self.bad_batch_dir else None
        return replace(
            self, model=critic.model, hf_dir=critic.hf_dir, optimizer=critic.optimizer, bad_batch_dir=folder,
            iteration=None, reference=None, freeze=(BIAS,), lora=None, chunk=None, balance=None, critic=None, reward_models={},
        )  # fmt: skip
