"""Training ranks and the ranks of models on separate devices, as one trainer.

Each model on separate devices has separate ranks, process groups and micro-batches. The ranks run
the same code as training ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.cluster.session import PlacedWorkers, Session
from msrl.plan.roles import SeparateModel
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.objective.batches import BatchLimits
from msrl.workflows.training.settings import CRITIC_FOLDER, separate_rank_settings
from msrl.workflows.training.train_worker import SavePlan
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import ray_ranks, save_plan


@dataclass(frozen=True, slots=True)
class SeparateGroup:
    """Ranks of a model on separate devices.

    A micro-batch has `micro_batch` sequences, if set. The checkpoints of a critic are in the folder
    of `saves`; the other models have none.
    """

    ranks: TrainerGroup
    micro_batch: int | None
    saves: SavePlan
    is_critic: bool

    def own_resume(self, resume: SavedTraining | None) -> SavedTraining | None:
        """Return the checkpoint of this model that belongs to a checkpoint of the run."""
        if resume is None or not self.is_critic:
            return None
        return SavedTraining(resume.root / CRITIC_FOLDER, resume.step)

    def limits(self, limits: BatchLimits) -> BatchLimits:
        """Return the limits of a micro-batch of this model, by default those of the policy."""
        return limits if self.micro_batch is None else BatchLimits(self.micro_batch)


class ModelGroups(TrainerGroup):
    """All ranks of a run. Models without separate devices are on the training ranks."""

    def __init__(
        self,
        trainers: TrainerGroup,
        separate: Mapping[str, SeparateGroup],  # by role
        *,
        shares_devices: bool,  # the engines share the training devices
    ) -> None:
        super().__init__(trainers.workers)
        self._separate, self._shares_devices = separate, shares_devices

    def start_separate(self, resume: SavedTraining | None) -> None:
        """Load the models that have separate devices."""
        for group in self._separate.values():
            group.ranks.start(group.own_resume(resume), group.saves)

    def end(self) -> None:
        super().end()
        for group in self._separate.values():
            group.ranks.end()

    def restart(self, resume: SavedTraining | None, saves: SavePlan) -> dict[str, Any]:
        extra = super().restart(resume, saves)
        for group in self._separate.values():
            group.ranks.restart(group.own_resume(resume), group.saves)
        return extra

    def has_separate(self, role: str) -> bool:
        """Return True if the model of a role has separate devices."""
        return role in self._separate

    def ranks_of(self, role: str, limits: BatchLimits) -> tuple[TrainerGroup, BatchLimits]:
        group = self._separate.get(role)
        return (self, limits) if group is None else (group.ranks, group.limits(limits))

    def offload(self) -> None:
        """Release the devices' memory, if engines need it."""
        if self._shares_devices:
            super().offload()

    def onload(self) -> None:
        """Take the devices' memory again, if it was released for engines."""
        if self._shares_devices:
            super().onload()

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save a checkpoint, the separate critic's first.

        One more checkpoint of the critic is kept, so that a run that dies in between can resume.
        """
        critic = self._separate.get("critic")
        if critic is not None:
            newest = None if retention.newest is None else retention.newest + 1
            critic.ranks.save(step, {}, Retention(newest, None, retention.best))
        return super().save(step, extra, retention)


def _saves(plan: RunPlan, role: str) -> SavePlan:
    """Return the settings for checkpoints of a model. Those of a critic are never in background."""
    if role != "critic" or plan.critic is None:
        return save_plan(plan)
    return SavePlan(plan.checkpoint_dir / CRITIC_FOLDER, plan.critic.hf_dir, in_background=False)


def separate_groups(
    plan: RunPlan,
    session: Session,
    placed: PlacedWorkers,
    platform: Platform,
    reward_models: Mapping[str, Path],
) -> dict[str, SeparateGroup]:
    """Create the actors of all models on separate devices, by role."""

    def create(model: SeparateModel) -> SeparateGroup:
        settings = separate_rank_settings(plan, platform.name, model, reward_models)
        timeout_s = plan.config.cluster.rpc_timeout_s
        ranks = ray_ranks(
            session, placed, plan.config, settings, platform, role=model.role, timeout_s=timeout_s
        )
        saves, is_critic = _saves(plan, model.role), model.role == "critic"
        return SeparateGroup(ranks, model.micro_batch, saves, is_critic)

    return {model.role: create(model) for model in plan.separate_models}
