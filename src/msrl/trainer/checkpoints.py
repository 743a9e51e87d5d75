"""Save and restore a training: weights in MindSpeed's layout, and beside them what it takes to go on to the bit.

Every rank takes part in both. Nothing is visible before all of it is written; `resume.py` tells where things lie.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from msrl.checkpoint import mcore
from msrl.checkpoint.carried import carry
from msrl.checkpoint.convert import versions
from msrl.checkpoint.hf import copy_sidecars
from msrl.checkpoint.names import LOCAL
from msrl.checkpoint.plan import make_plan, rank_plan
from msrl.checkpoint.source import ShardedSource
from msrl.checkpoint.torch_file import WrittenFile
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.models.cut import Coords, Cut
from msrl.trainer import optimizer_state
from msrl.trainer.megatron import named_weights
from msrl.trainer.resume import KEEP_ALL, STATE, Retention, SavedTraining, training_dir

_TRACKED = "tracked."

if TYPE_CHECKING:
    from msrl.trainer.worker import TrainWorker


def save(
    worker: TrainWorker, root: Path, step: int, extra: Mapping[str, Any], *, hf_dir: Path, retention: Retention = KEEP_ALL
) -> SavedTraining:
    """Write a whole checkpoint after `step` steps. `extra` is the workflow's own state (JSON); `hf_dir` has config and tokenizer."""
    worker.host.need("params", "optimizer")
    is_first = dist.get_rank() == 0
    staged_training = training_dir(root, step).with_name(f".iter_{step:07d}.partial")
    if is_first:
        for folder in (mcore.staging_dir(root, step), staged_training):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    dist.barrier()
    file = _write_rank(worker, root, step, staged_training)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file)
    if is_first:
        updates, frozen = optimizer_state.num_updates(worker), list(worker.settings.freeze)
        state = {"step": step, "cut": worker.layout.as_json(), "updates": updates, "freeze": frozen, "extra": dict(extra)}
        write_text(staged_training / STATE, json.dumps(state, indent=1) + "\n")
        _publish(worker, root, step, staged_training, [entry for entry in files if entry is not None], hf_dir)
        _prune(root, retention)
    dist.barrier()
    return SavedTraining(root, step)


def _write_rank(worker: TrainWorker, root: Path, step: int, staged_training: Path) -> tuple[str, WrittenFile] | None:
    """This rank's part; the first of the ranks that hold the same writes for all. Returns what it wrote."""
    states = {name: state.cpu() for name, state in optimizer_state.collect(worker)}
    save_file(_random_states(), _random_file(staged_training))
    if not worker.is_writer:
        return None
    path = mcore.rank_file(root, step, worker.layout, worker.coords, staged=True)
    args = mcore.namespace(worker.shape, worker.layout, dtype=worker.settings.dtype)
    if worker.settings.lora:
        lora = worker.settings.lora
        vars(args).update(lora_r=lora.rank, lora_alpha=lora.alpha, lora_target_modules=list(lora.targets))
    saved = named_weights(worker.policy) if worker.adapters is None else worker.adapters.named()
    model = {name: weight.detach() for name, weight in saved.items()}
    written = mcore.write_rank_file(path, model, args, step)
    save_file(states, staged_training / _optimizer_file(worker.coords))
    name = path.relative_to(mcore.staging_dir(root, step))
    return str(mcore.iteration_dir(root, step).relative_to(root) / name), written


def _optimizer_file(at: Coords) -> str:
    return f"optimizer_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"


def _publish(
    worker: TrainWorker, root: Path, step: int, staged_training: Path, files: Iterable[tuple[str, WrittenFile]], hf_dir: Path
) -> None:
    """Make the checkpoint visible: what only a resume needs first, the model and its tracker last."""
    final = training_dir(root, step)
    shutil.rmtree(final, ignore_errors=True)
    shutil.rmtree(mcore.iteration_dir(root, step), ignore_errors=True)
    staged_training.rename(final)
    if hf_dir.resolve() != (root / mcore.SIDECAR).resolve():
        copy_sidecars(hf_dir, root / mcore.SIDECAR, worker.dtype)
        carry(hf_dir, root / mcore.SIDECAR, worker.shape)
    mcore.publish(root, step)
    plan = make_plan(worker.shape, worker.layout)
    entry = mcore.manifest_entry(worker.shape, plan, worker.settings.dtype, dict(files), LOCAL, versions())
    mcore.write_manifest(root, step, {**entry, "adapters_only": True} if worker.adapters else entry)


def _prune(root: Path, retention: Retention) -> None:
    """Remove what need not stay; the model's folder first, so that what is left is never taken for whole."""
    for step in retention.surplus(root):
        shutil.rmtree(mcore.iteration_dir(root, step))
        shutil.rmtree(training_dir(root, step))


def load_training_state(worker: TrainWorker, saved: SavedTraining) -> dict[str, Any]:
    """Restore the optimizer from a checkpoint of any layout (the weights were loaded when the worker was made). Returns `extra`."""
    state = saved.state()
    if tuple(state.get("freeze", ())) != worker.settings.freeze:
        before = state.get("freeze", [])
        raise MsrlError(f"train.freeze: {saved.training_dir} was trained with {before}; set it so, or start anew with checkpoint.load")
    if worker.adapters is not None:
        worker.adapters.load(saved.root, saved.step)
    cut = Cut.from_json(state["cut"])
    files = {at: safe_open(saved.training_dir / _optimizer_file(at), "pt") for at in cut.ranks()}
    mine: dict[str, dict[str, Tensor]] = {}
    for kind in optimizer_state.kinds(worker.dtype):
        shards = {at: _of_kind(worker, cut, at, file, kind) for at, file in files.items()}
        if worker.adapters is not None:
            mine[kind] = worker.adapters.recut(cut, shards, str(saved.training_dir))
            continue
        source = ShardedSource(worker.shape, cut, shards, saved.root / mcore.SIDECAR, str(saved.training_dir))
        mine[kind] = dict(source.local_tensors(worker.layout, worker.coords))
    optimizer_state.restore(worker, mine, state["updates"])
    _restore_random(saved)
    return state["extra"]


def _restore_random(saved: SavedTraining) -> None:
    """Random numbers go on where this rank left off; a rank that the saved layout did not have keeps those of its seed."""
    path = _random_file(saved.training_dir)
    if path.is_file():
        with safe_open(path, "pt") as file:
            torch.set_rng_state(file.get_tensor("rng"))
            tracked = {name.removeprefix(_TRACKED): file.get_tensor(name) for name in file.keys() if name.startswith(_TRACKED)}  # noqa: SIM118
        if tracked:
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            tracker.set_states(tracked)


def _random_states() -> dict[str, Tensor]:
    """Of torch's generator, and of Megatron's, from which parts of a tensor that differ by rank are drawn."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracked: dict[str, Tensor] = tracker.get_states()
    return {"rng": torch.get_rng_state(), **{_TRACKED + name: state.cpu().clone() for name, state in tracked.items()}}


def _random_file(folder: Path) -> Path:
    return folder / f"rng_{dist.get_rank():05d}.safetensors"


def _of_kind(worker: TrainWorker, cut: Cut, at: Coords, file: Any, kind: str) -> dict[str, Tensor]:
    """What one rank's file has of a kind; what has no state (frozen parameters, biases of experts) as zeros that take no memory."""
    found = {name.removeprefix(f"{kind}."): file.get_tensor(name) for name in file.keys() if name.startswith(f"{kind}.")}  # noqa: SIM118
    if not worker.settings.freeze and not (worker.shape.moe and worker.shape.moe.expert_bias):
        return found
    planned = rank_plan(worker.shape, cut, at, worker.shape.padded_vocab_size(cut.tp)).tensors
    return {name: found.get(name, torch.zeros(()).expand(size)) for name, size in planned.items()}
