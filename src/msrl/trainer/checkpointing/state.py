"""State of a training: collected for a checkpoint, and restored from one bit for bit.

Weights are stored in MindSpeed's format, optimizer and random-number states beside them. All ranks
take part in both. Nothing is visible before all of it is written: `resume.py` describes the
folders, `publish.py` writes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors import safe_open
from torch import Tensor

from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.rank_shapes import rank_plan
from msrl.checkpoint.source import ShardedSource
from msrl.config.sections.train import VisionConfig
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.select import frozen_names
from msrl.platforms.base import Platform
from msrl.trainer import optimizer_state
from msrl.trainer.checkpointing.publish import (
    WEIGHT,
    Publication,
    RankFiles,
    SavedModel,
    Weights,
    critic_file,
    optimizer_file,
    prepare_folders,
    random_file,
    tensors_with_prefix,
)
from msrl.trainer.checkpointing.resume import KEEP_ALL, Retention, SavedTraining
from msrl.trainer.model.build import named_weights

_TRACKED, _DEVICE = "tracked.", "device."  # the latter is followed by the platform's name

if TYPE_CHECKING:
    from msrl.trainer.groups import RankPosition
    from msrl.trainer.rank import TrainingRank
    from msrl.trainer.replica import ModelReplica


def save(
    rank: TrainingRank,
    root: Path,
    step: int,
    extra: Mapping[str, Any],
    *,
    hf_dir: Path,
    retention: Retention = KEEP_ALL,
) -> SavedTraining:
    """Write a complete checkpoint after `step` steps.

    `extra` is the workflow's state (JSON); `hf_dir` has config and tokenizer.
    """
    files, publication = begin(rank, root, step, extra, hf_dir=hf_dir, retention=retention)
    files.write()
    dist.barrier()
    if publication is not None:
        publication.publish()
    dist.barrier()
    return SavedTraining(root, step)


def begin(
    rank: TrainingRank,
    root: Path,
    step: int,
    extra: Mapping[str, Any],
    *,
    hf_dir: Path,
    retention: Retention,
    keeps_copy: bool = False,
) -> tuple[RankFiles, Publication | None]:
    """Collect the state of all ranks.

    Returns the files of this rank and, on the first rank, the publication of the checkpoint.

    With `keeps_copy` neither refers to tensors that training changes.
    """
    trained = rank.trained_replicas()
    for replica in trained:
        replica.host.onload("params", "optimizer")
    is_first = dist.get_rank() == 0
    if is_first:
        prepare_folders(root, step)
    dist.barrier()
    # Now the folders exist that all ranks write to.
    files = _rank_files(rank, root, step, keeps_copy=keeps_copy)
    updates = [optimizer_state.num_updates(replica) for replica in trained]
    if not is_first:
        return files, None
    policy, layout = rank.main, rank.settings.layout
    frozen = list(policy.settings.freeze)
    state = {
        "step": step,
        "cut": layout.as_json(),
        "updates": updates[0],
        "freeze": frozen,
        "trains_indexers": bool(policy.settings.indexer_loss_coef),
        "trains_vision": _trained_vision(policy.settings.vision),
        "extra": dict(extra),
    }
    if rank.critic is not None:
        state["critic"] = {"updates": updates[-1]}
    model = SavedModel(
        policy.shape, layout, rank.settings.dtype, is_adapters=policy.adapters is not None
    )
    return files, Publication(
        root, step, dist.get_world_size(), state, model, hf_dir, retention, rank.settings.chat
    )


def _rank_files(rank: TrainingRank, root: Path, step: int, *, keeps_copy: bool) -> RankFiles:
    """Return the files that this rank writes.

    Weights are written by the first of the ranks that hold the same shard.
    """
    position = rank.position
    states: dict[str, dict[str, Tensor]] = {}
    if rank.has_policy:
        states[optimizer_file(position.coords)] = _states(rank.policy)
    if rank.critic is not None:
        states[critic_file(position.coords)] = _states(rank.critic) | _weight_states(rank.critic)
    random_states = _random_states(position.platform)
    if not position.is_writer:
        return RankFiles(root, step, dist.get_rank(), random_states)
    weights = {name: weight.detach() for name, weight in _saved_weights(rank.main).items()}
    if keeps_copy:
        weights = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
    folder = mcore.rank_folder(position.layout, position.coords)
    return RankFiles(
        root, step, dist.get_rank(), random_states, Weights(folder, weights, _args(rank), states)
    )


def _args(rank: TrainingRank) -> argparse.Namespace:
    """Return the arguments that a checkpoint file of Megatron holds."""
    policy = rank.main
    args = mcore.namespace(policy.shape, rank.settings.layout, dtype=rank.settings.dtype)
    lora = policy.settings.lora
    if lora.rank is not None:
        vars(args).update(
            lora_r=lora.rank, lora_alpha=lora.alpha, lora_target_modules=list(lora.targets)
        )
        # The base model, which the checkpoint does not contain.
        vars(args).update(load=str(policy.settings.model.absolute()))
    return args


def _saved_weights(replica: ModelReplica) -> Mapping[str, Tensor]:
    """Return the weights that checkpoints contain: all weights, or the adapters alone."""
    adapters = replica.adapters
    return named_weights(replica.model) if adapters is None else adapters.trained_parameters()


def _states(replica: ModelReplica) -> dict[str, Tensor]:
    """Return the state of the optimizer. All data-parallel ranks must call it."""
    return {name: state.cpu() for name, state in optimizer_state.collect(replica)}


def _weight_states(critic: ModelReplica) -> dict[str, Tensor]:
    """Return copies of the critic's weights, for the file of its optimizer."""
    return {
        f"{WEIGHT}.{name}": weight.detach().to("cpu", copy=True)
        for name, weight in _saved_weights(critic).items()
    }


def load_training_state(rank: TrainingRank, saved: SavedTraining) -> dict[str, Any]:
    """Restore the training from a checkpoint of any parallel layout and return `extra`.

    The rank has loaded the policy's weights before.

    Raises MsrlError if frozen parameters or the presence of a critic differ from the saved
    training.
    """
    state = saved.state()
    _check_resumable(rank, saved, state)
    if rank.has_policy:
        _restore_policy(rank.policy, saved, state["updates"])
    if rank.critic is not None:
        _restore_critic(rank.critic, saved, state["critic"]["updates"])
    _restore_random(rank.position, saved, ParallelLayout.from_json(state["cut"]))
    return state["extra"]


def _check_resumable(rank: TrainingRank, saved: SavedTraining, state: Mapping[str, Any]) -> None:
    freeze = rank.main.settings.freeze
    if tuple(state.get("freeze", ())) != freeze:
        before = list(state.get("freeze", []))
        raise MsrlError(
            f"train.freeze={list(freeze)}: {saved.training_dir} was trained with {before}. Set the "
            "same value, or start a new training from its weights with checkpoint.load."
        )
    before, own = state.get("trains_vision", []), _trained_vision(rank.main.settings.vision)
    if before != own:
        name = next(
            name for name in ("tower_lr", "projector_lr") if (name in before) != (name in own)
        )
        did, remedy = ("with", "Set") if name in before else ("without", "Remove")
        raise MsrlError(
            f"train.vision.{name}: {saved.training_dir} was trained {did} this key. {remedy} it, "
            "or start a new training from its weights with checkpoint.load."
        )
    coef = rank.main.settings.indexer_loss_coef
    if bool(state.get("trains_indexers")) != bool(coef):
        did = "with a coefficient above 0" if coef == 0 else "with 0"
        raise MsrlError(
            f"train.indexer_loss_coef={coef}: {saved.training_dir} was trained {did}. Set the same "
            "value, or start a new training from its weights with checkpoint.load."
        )
    if (rank.critic is None) != ("critic" not in state):
        saved_critic, own_critic = (
            ("no critic", "has one") if rank.critic else ("a critic", "has none")
        )
        raise MsrlError(
            f"algo.advantage.estimator: {saved.training_dir} was trained with {saved_critic}, and "
            f"this training {own_critic}. Set the same estimator, or start a new training from its "
            "weights with checkpoint.load."
        )


def _trained_vision(vision: VisionConfig) -> list[str]:
    """Return the keys of the components of a vision tower that are trained."""
    return [name for name in ("tower_lr", "projector_lr") if getattr(vision, name) is not None]


def _restore_policy(policy: ModelReplica, saved: SavedTraining, updates: int) -> None:
    """Restore adapters and the state of the optimizer."""
    if policy.adapters is not None:
        policy.adapters.load(saved.root, saved.step)
    kinds = optimizer_state.kinds(policy.position.dtype)
    states = _saved_states(policy, saved, optimizer_file, kinds)
    optimizer_state.restore(policy, states, updates)


def _restore_critic(critic: ModelReplica, saved: SavedTraining, updates: int) -> None:
    """Restore the critic's weights, then the state of its optimizer."""
    states = _saved_states(
        critic, saved, critic_file, (WEIGHT, *optimizer_state.kinds(critic.position.dtype))
    )
    with torch.no_grad():
        for name, weight in _saved_weights(critic).items():
            weight.copy_(states[WEIGHT][name])
    optimizer_state.restore(critic, states, updates)


def _saved_states(
    replica: ModelReplica,
    saved: SavedTraining,
    file_name: Callable[[Coords], str],
    kinds: Sequence[str],
) -> dict[str, dict[str, Tensor]]:
    """Return this rank's tensors by kind and name, from the files of all saved ranks."""
    layout = ParallelLayout.from_json(saved.state()["cut"])
    files = {at: safe_open(saved.training_dir / file_name(at), "pt") for at in layout.ranks()}
    states: dict[str, dict[str, Tensor]] = {}
    for kind in kinds:
        shards = {at: _shard(replica, layout, at, file, kind) for at, file in files.items()}
        if replica.adapters is not None:
            states[kind] = replica.adapters.reshard(layout, shards, str(saved.training_dir))
            continue
        source = ShardedSource(
            replica.shape, layout, shards, saved.root / mcore.SIDECAR, str(saved.training_dir)
        )
        states[kind] = dict(source.local_tensors(replica.position.layout, replica.position.coords))
    return states


def _restore_random(position: RankPosition, saved: SavedTraining, layout: ParallelLayout) -> None:
    """Restore the states of this rank's random-number generators.

    Ranks that the saved layout lacks, and devices of another kind, keep the states that their seed
    gives. So do all ranks if the tensor-parallel size has changed: ranks that hold copies must draw
    the same numbers, and the saved states are of ranks without copies.
    """
    path = saved.training_dir / random_file(dist.get_rank())
    if layout.tp != position.layout.tp or not path.is_file():
        return
    with safe_open(path, "pt") as file:
        torch.set_rng_state(file.get_tensor("rng"))
        of_device, tracked = tensors_with_prefix(file, _DEVICE), tensors_with_prefix(file, _TRACKED)
    if position.platform.name in of_device:
        position.platform.set_random_state(of_device[position.platform.name])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    if tracked and _sizes(tracked) == _sizes(tracker.get_states()):
        tracker.set_states(tracked)


def _sizes(states: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: len(state) for name, state in states.items()}


def _random_states(platform: Platform) -> dict[str, Tensor]:
    """Return the states of all random-number generators.

    These are torch's generator, the device's if it has a separate one, and Megatron's for numbers
    that differ by rank.
    """
    own = platform.random_state()
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracked: dict[str, Tensor] = tracker.get_states()
    of_device = {} if own is None else {_DEVICE + platform.name: own.cpu().clone()}
    return {
        "rng": torch.get_rng_state(),
        **of_device,
        **{_TRACKED + name: state.cpu().clone() for name, state in tracked.items()},
    }


def _shard(
    replica: ModelReplica, layout: ParallelLayout, at: Coords, file: Any, kind: str
) -> dict[str, Tensor]:
    """Return the tensors of a kind in one rank's file.

    Parameters without a state (frozen ones, biases of experts) are zeros without memory.
    """
    stored = tensors_with_prefix(file, f"{kind}.")
    has_biases = replica.shape.moe is not None and replica.shape.moe.expert_bias
    settings = replica.settings
    frozen = frozen_names(replica.shape, settings.freeze, settings.vision.trained)
    is_all_trained = not frozen and not has_biases
    if replica.adapters is not None or is_all_trained:
        return stored
    padded = replica.shape.padded_vocab_size(layout.tp)
    planned = rank_plan(replica.shape, layout, at, padded).tensors
    return {name: stored.get(name, torch.zeros(()).expand(size)) for name, size in planned.items()}
