"""Save and restore a training: weights in MindSpeed's layout, and beside them what it takes to go on to the bit.

Every rank takes part in both. Nothing is visible before all of it is written; `resume.py` tells where things lie, `saving.py` writes them.
"""

from __future__ import annotations

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
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.platforms.base import Platform
from msrl.trainer import optimizer_state
from msrl.trainer.checkpointing.publish import (
    WEIGHT,
    Publication,
    RankFiles,
    SavedModel,
    Weights,
    beginning,
    critic_file,
    optimizer_file,
    prepare_folders,
    random_file,
)
from msrl.trainer.checkpointing.resume import KEEP_ALL, Retention, SavedTraining
from msrl.trainer.model.build import named_weights

_TRACKED, _DEVICE = "tracked.", "device."  # the latter is followed by the platform's name

if TYPE_CHECKING:
    from msrl.trainer.rank import TrainWorker
    from msrl.trainer.replica import Learner


def save(
    worker: TrainWorker, root: Path, step: int, extra: Mapping[str, Any], *, hf_dir: Path, retention: Retention = KEEP_ALL
) -> SavedTraining:
    """Write a whole checkpoint after `step` steps. `extra` is the workflow's own state (JSON); `hf_dir` has config and tokenizer."""
    part, publication = begin(worker, root, step, extra, hf_dir=hf_dir, retention=retention)
    part.write()
    dist.barrier()
    if publication is not None:
        publication.publish()
    dist.barrier()
    return SavedTraining(root, step)


def begin(
    worker: TrainWorker, root: Path, step: int, extra: Mapping[str, Any], *, hf_dir: Path, retention: Retention, keeps_copy: bool = False
) -> tuple[RankFiles, Publication | None]:
    """What is left to do for a checkpoint once all ranks have met: this rank's part and, on the first rank, making the whole visible.

    With `keeps_copy` neither refers to anything that training changes.
    """
    for learner in _learners(worker):
        learner.host.need("params", "optimizer")
    is_first = dist.get_rank() == 0
    if is_first:
        prepare_folders(root, step)
    dist.barrier()
    part = _part(worker, root, step, keeps_copy=keeps_copy)
    updates = [optimizer_state.num_updates(learner) for learner in _learners(worker)]
    if not is_first:
        return part, None
    frozen = list(worker.settings.freeze)
    state = {"step": step, "cut": worker.layout.as_json(), "updates": updates[0], "freeze": frozen, "extra": dict(extra)}
    if worker.critic is not None:
        state["critic"] = {"updates": updates[1]}
    model = SavedModel(worker.shape, worker.layout, worker.settings.dtype, is_adapters=worker.adapters is not None)
    return part, Publication(root, step, dist.get_world_size(), state, model, hf_dir, retention, worker.settings.chat)


def _part(worker: TrainWorker, root: Path, step: int, *, keeps_copy: bool) -> RankFiles:
    """What this rank writes; the first of the ranks that hold the same writes for all."""
    states = {optimizer_file(worker.coords): _states(worker)}
    if worker.critic is not None:
        states[critic_file(worker.coords)] = _states(worker.critic) | _weight_states(worker.critic)
    number = dist.get_rank()
    if not worker.is_writer:
        return RankFiles(root, step, number, _random_states(worker.platform))
    args = mcore.namespace(worker.shape, worker.layout, dtype=worker.settings.dtype)
    if worker.settings.lora:
        lora = worker.settings.lora
        vars(args).update(lora_r=lora.rank, lora_alpha=lora.alpha, lora_target_modules=list(lora.targets))
        vars(args).update(load=str(worker.settings.model.absolute()))  # the base, which the checkpoint does not hold
    saved = named_weights(worker.model) if worker.adapters is None else worker.adapters.named()
    weights = {name: weight.detach() for name, weight in saved.items()}
    if keeps_copy:
        weights = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
    folder = mcore.rank_folder(worker.layout, worker.coords)
    return RankFiles(root, step, number, _random_states(worker.platform), Weights(folder, weights, args, states))


def _learners(worker: TrainWorker) -> list[Learner]:
    return [worker] if worker.critic is None else [worker, worker.critic]


def _states(learner: Learner) -> dict[str, Tensor]:
    """The optimizer's; all data-parallel ranks take part."""
    return {name: state.cpu() for name, state in optimizer_state.collect(learner)}


def _weight_states(critic: Learner) -> dict[str, Tensor]:
    """Copies of the critic's weights, for the file of its optimizer."""
    return {f"{WEIGHT}.{name}": weight.detach().to("cpu", copy=True) for name, weight in named_weights(critic.model).items()}


def load_training_state(worker: TrainWorker, saved: SavedTraining) -> dict[str, Any]:
    """Restore the optimizer from a checkpoint of any layout (the weights were loaded when the worker was made). Returns `extra`."""
    state = saved.state()
    if tuple(state.get("freeze", ())) != worker.settings.freeze:
        before = state.get("freeze", [])
        raise MsrlError(f"train.freeze: {saved.training_dir} was trained with {before}; set it so, or start anew with checkpoint.load")
    if (worker.critic is None) != ("critic" not in state):
        has, wants = ("no critic", "one") if worker.critic else ("a critic", "none")
        told = f"{saved.training_dir} was trained with {has}, and this training has {wants}"
        raise MsrlError(f"algo.advantage.estimator: {told}; set it as it was, or start anew with checkpoint.load")
    if worker.adapters is not None:
        worker.adapters.load(saved.root, saved.step)
    optimizer_state.restore(worker, _states_of(worker, saved, optimizer_file, optimizer_state.kinds(worker.dtype)), state["updates"])
    if worker.critic is not None:
        _restore_critic(worker.critic, saved, state["critic"]["updates"])
    _restore_random(worker, saved, ParallelLayout.from_json(state["cut"]))
    return state["extra"]


def _restore_critic(critic: Learner, saved: SavedTraining, updates: int) -> None:
    """The weights first, then its optimizer's state."""
    states = _states_of(critic, saved, critic_file, (WEIGHT, *optimizer_state.kinds(critic.dtype)))
    with torch.no_grad():
        for name, weight in named_weights(critic.model).items():
            weight.copy_(states[WEIGHT][name])
    optimizer_state.restore(critic, states, updates)


def _states_of(
    learner: Learner, saved: SavedTraining, tensor_file: Callable[[Coords], str], kinds: Sequence[str]
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """This rank's tensors by kind and name, from the files of all ranks of the saved layout."""
    cut = ParallelLayout.from_json(saved.state()["cut"])
    files = {at: safe_open(saved.training_dir / tensor_file(at), "pt") for at in cut.ranks()}
    mine: dict[str, dict[str, Tensor]] = {}
    for kind in kinds:
        shards = {at: _of_kind(learner, cut, at, file, kind) for at, file in files.items()}
        if learner.adapters is not None:
            mine[kind] = learner.adapters.recut(cut, shards, str(saved.training_dir))
            continue
        source = ShardedSource(learner.shape, cut, shards, saved.root / mcore.SIDECAR, str(saved.training_dir))
        mine[kind] = dict(source.local_tensors(learner.layout, learner.coords))
    return mine


def _restore_random(worker: TrainWorker, saved: SavedTraining, cut: ParallelLayout) -> None:
    """Random numbers go on where this rank left off; a rank that the saved layout did not have, and a device of another kind than the saved
    one, keep those of their seed.

    So do all ranks where other ones are tensor-parallel now: they must draw the same numbers for what they hold alike, and those that were
    saved are of ranks that had nothing in common.
    """
    path = saved.training_dir / random_file(dist.get_rank())
    if cut.tp == worker.layout.tp and path.is_file():
        with safe_open(path, "pt") as file:
            torch.set_rng_state(file.get_tensor("rng"))
            of_device, tracked = beginning(file, _DEVICE), beginning(file, _TRACKED)
        if worker.platform.name in of_device:
            worker.platform.set_random_state(of_device[worker.platform.name])
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        if tracked and _sizes(tracked) == _sizes(tracker.get_states()):
            tracker.set_states(tracked)


def _sizes(states: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: len(state) for name, state in states.items()}


def _random_states(platform: Platform) -> dict[str, Tensor]:
    """Of torch's generator, of the device's where that is another, and of Megatron's, from which parts of a tensor that differ by rank are
    drawn."""
    own = platform.random_state()
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracked: dict[str, Tensor] = tracker.get_states()
    of_device = {} if own is None else {_DEVICE + platform.name: own.cpu().clone()}
    return {"rng": torch.get_rng_state(), **of_device, **{_TRACKED + name: state.cpu().clone() for name, state in tracked.items()}}


def _of_kind(learner: Learner, cut: ParallelLayout, at: Coords, file: Any, kind: str) -> dict[str, Tensor]:
    """What one rank's file has of a kind; what has no state (frozen parameters, biases of experts) as zeros that take no memory."""
    found = beginning(file, f"{kind}.")
    is_all_trained = not learner.settings.freeze and not (learner.shape.moe and learner.shape.moe.expert_bias)
    if learner.adapters is not None or is_all_trained:
        return found
    planned = rank_plan(learner.shape, cut, at, learner.shape.padded_vocab_size(cut.tp)).tensors
    return {name: found.get(name, torch.zeros(()).expand(size)) for name, size in planned.items()}
