"""The Ray actors of GRPO: thin shells around a training rank and around a rollout engine.
Everything heavy is imported inside.
"""

from __future__ import annotations

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
class RankPlace:
    """Where a rank stands in the layout. The reporter of a data-parallel rank is the first
    tensor-parallel rank of the last stage.

    The tokens of its micro-batches are a multiple of `sequence_multiple`, for whichever model they
    are.
    """

    dp_rank: int
    is_reporter: bool
    sequence_multiple: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Where checkpoints go, the folder with config and tokenizer, and whether they are written
    beside the training.
    """

    root: Path
    hf_dir: Path
    in_background: bool


class TrainActor:
    """One training rank."""

    def __init__(self, settings: RankSettings, rank: int, world_size: int) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size

    def rendezvous(self) -> str:
        """Where the ranks meet; asked of rank 0, which holds the place until they have met."""
        self._rendezvous = Rendezvous()
        return self._rendezvous.init_method

    def start(
        self, init_method: str, resume: SavedTraining | None, saves: SavePlan
    ) -> tuple[RankPlace, dict[str, Any]]:
        """Join the other ranks and load. Returns the rank's place, and the workflow's own state of
        the checkpoint.
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
        return RankPlace(
            position.dp_rank, is_reporter, self._training_rank.sequence_multiple
        ), extra

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float, of_reference: bool
    ) -> list[Floats] | None:
        return self._training_rank.logprobs(micro_batches, temperature, of_reference=of_reference)

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, num_tokens: int, lr: float
    ) -> dict[str, float]:
        with self._saves_come_first():
            return self._training_rank.train_step(micro_batches, loss, num_tokens=num_tokens, lr=lr)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Floats] | None:
        return self._training_rank.values(micro_batches)

    def update_critic(
        self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, num_tokens: int, lr: float
    ) -> dict[str, float]:
        with self._saves_come_first():
            return self._training_rank.train_critic_step(
                micro_batches, loss, num_tokens=num_tokens, lr=lr
            )

    def scores(self, micro_batches: Sequence[MicroBatch], name: str) -> list[Floats] | None:
        return self._training_rank.scores(name, micro_batches)

    @contextmanager
    def _saves_come_first(self) -> Iterator[None]:
        """An update that ends the run does so when the save under way is whole."""
        from msrl.trainer.guard import GradientError

        try:
            yield
        except GradientError:
            self._saver.end()
            raise

    def weights(self) -> tuple[Bucket, ...]:
        """This stage's weights under their Hugging Face names on its first rank; nothing on the
        others, which take part.
        """
        from msrl.trainer.weights import export

        parcels = pack(export(self._training_rank.policy))
        self._training_rank.offload()
        return parcels

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save, or begin to; the saves that were finished since this was asked last."""
        self._saver.save(step, extra, retention)
        return self._saver.finished()

    def finish_saves(self) -> list[SavedTraining]:
        """Wait for the save under way, if there is one; the saves that were finished since they
        were asked for last.
        """
        return self._saver.finished(must_wait=True)


class RolloutActor:
    """One rollout engine."""

    def __init__(self, settings: EngineSettings, platform: str) -> None:
        self._settings, self._platform = settings, platform

    def start(self) -> None:
        """Start the engine; here and not in the constructor, because Ray keeps an error of a method
        whole.
        """
        from msrl.rollout.vllm import VllmEngine

        self._engine = VllmEngine(self._settings, get(self._platform))

    def release(self) -> None:
        """End the engine's processes and remove its files; the actor is killed next."""
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
        self._engine.load_weights(unpack(parcel for stage in stages for parcel in stage))
