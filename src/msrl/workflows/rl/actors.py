"""Ray actors of GRPO: a training rank and a rollout engine.

Actors import torch, Megatron and vLLM in their methods, so that the driver can import this module
without them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.cluster.rendezvous import Rendezvous
from msrl.platforms import get
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.launch import quiet_megatron
from msrl.trainer.settings import RankSettings
from msrl.types import Floats, MicroBatch, Prompt, RolloutGroup, SamplingParams
from msrl.workflows.rl.weight_transfer import Bucket, pack, unpack

if TYPE_CHECKING:
    from msrl.rollout.engine import EngineSettings
    from msrl.trainer.objective.losses import Loss, ValueLoss


@dataclass(frozen=True, slots=True)
class ActorPosition:
    """Position of a rank in the parallel layout.

    The reporter of a data-parallel rank is the first tensor-parallel rank of the last pipeline
    stage. The number of tokens of every micro-batch must be a multiple of `sequence_multiple`, for
    all models of the rank.
    """

    dp_rank: int
    is_reporter: bool
    sequence_multiple: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Settings for saving checkpoints."""

    root: Path  # folder of the checkpoints
    hf_dir: Path  # folder with config and tokenizer
    in_background: bool  # write checkpoints while training continues


class TrainActor:
    """Actor of one training rank."""

    def __init__(self, settings: RankSettings, rank: int, world_size: int) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size

    def rendezvous(self) -> str:
        """Return the rendezvous address of the ranks.

        Rank 0 reserves it until all ranks have joined.
        """
        self._rendezvous = Rendezvous()
        return self._rendezvous.init_method

    def start(
        self, init_method: str, resume: SavedTraining | None, saves: SavePlan
    ) -> tuple[ActorPosition, dict[str, Any]]:
        """Join the other ranks and load the models.

        Returns:
            The rank's position, and the workflow's state in the checkpoint.
        """
        get(self._settings.platform).prepare()
        quiet_megatron()
        from msrl.trainer.checkpointing import state as checkpoints
        from msrl.trainer.checkpointing.saver import Saver
        from msrl.trainer.rank import TrainingRank

        self._training_rank = TrainingRank(
            self._settings, self._rank, self._world_size, init_method
        )
        if self._rank == 0:
            self._rendezvous.close()
        extra = checkpoints.load_training_state(self._training_rank, resume) if resume else {}
        self._saver = Saver(
            self._training_rank, saves.root, saves.hf_dir, in_background=saves.in_background
        )
        position = self._training_rank.position
        is_reporter = position.is_last_stage and position.tp_rank == 0
        multiple = self._training_rank.sequence_multiple
        return ActorPosition(position.dp_rank, is_reporter, multiple), extra

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float, of_reference: bool
    ) -> list[Floats] | None:
        return self._training_rank.logprobs(micro_batches, temperature, of_reference=of_reference)

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, num_tokens: int, lr: float
    ) -> dict[str, float]:
        with self._finish_saves_on_gradient_error():
            return self._training_rank.train_step(micro_batches, loss, num_tokens=num_tokens, lr=lr)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Floats] | None:
        return self._training_rank.values(micro_batches)

    def update_critic(
        self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, num_tokens: int, lr: float
    ) -> dict[str, float]:
        with self._finish_saves_on_gradient_error():
            return self._training_rank.train_critic_step(
                micro_batches, loss, num_tokens=num_tokens, lr=lr
            )

    def scores(self, micro_batches: Sequence[MicroBatch], name: str) -> list[Floats] | None:
        return self._training_rank.scores(name, micro_batches)

    @contextmanager
    def _finish_saves_on_gradient_error(self) -> Iterator[None]:
        """Complete pending saves if an update ends the run."""
        from msrl.trainer.guard import GradientError

        try:
            yield
        except GradientError:
            self._saver.end()
            raise

    def weights(self) -> tuple[Bucket, ...]:
        """Return the policy's weights of this stage by Hugging Face name, then offload the policy.

        Only the first rank of a stage returns weights; all ranks must call it.
        """
        from msrl.trainer.weights import export

        buckets = pack(export(self._training_rank.policy))
        self._training_rank.offload()
        return buckets

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save a checkpoint, or begin to; return the saves completed since the last call."""
        self._saver.save(step, extra, retention)
        return self._saver.finished()

    def finish_saves(self) -> list[SavedTraining]:
        """Wait for a pending save and return the saves that were completed since the last call."""
        return self._saver.finished(must_wait=True)


class RolloutActor:
    """Actor of one rollout engine."""

    def __init__(self, settings: EngineSettings, platform: str) -> None:
        self._settings, self._platform = settings, platform

    def start(self) -> None:
        """Start the engine.

        This is not in the constructor because Ray reports an error of a method with its type and
        message.
        """
        from msrl.rollout.vllm import VllmEngine

        self._engine = VllmEngine(self._settings, get(self._platform))

    def release(self) -> None:
        """End the engine's processes and remove its files before the actor is killed."""
        self._engine.release()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        self._engine.wake()
        groups = self._engine.generate(prompts, sampling, policy_version)
        self._engine.sleep()
        return groups

    def forget_prompts(self) -> None:
        self._engine.forget_prompts()

    def load_weights(self, *stages: tuple[Bucket, ...]) -> None:
        self._engine.wake()
        self._engine.load_weights(unpack(itertools.chain.from_iterable(stages)))
