"""Engine that evaluates several checkpoints in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.config.schema import Config
from msrl.data.tokenizer import open_tokenizer, vocab_hash
from msrl.models.shape import Shape
from msrl.plan.run_plan import RunPlan, resolve
from msrl.rollout.engine import EngineSettings
from msrl.workflows.engine import data_images, engine_settings, hf_weights, running_engine
from msrl.workflows.evaluate.checkpoints import (
    Checkpoint,
    digest,
    model_folder,
    open_checkpoint,
    with_unique_labels,
)
from msrl.workflows.evaluate.results import ResultFolder

if TYPE_CHECKING:
    from msrl.rollout.vllm import VllmEngine


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A checkpoint with its plan and digest. `is_finished` if its results are there already."""

    checkpoint: Checkpoint
    plan: RunPlan
    digest: str
    is_finished: bool


def model_plan(config: Config, checkpoint: Checkpoint) -> RunPlan:
    """Return a plan whose model is the checkpoint and whose only data are the held-out prompts."""
    folder = str(model_folder(checkpoint))
    prompts = None if config.evaluate.benchmarks else config.data.eval
    data = config.data.model_copy(update={"train": prompts, "eval": prompts, "blend": {}})
    model = config.model.model_copy(update={"path": folder})
    loading = config.checkpoint.model_copy(update={"load": None})
    updates = {"data": data, "model": model, "checkpoint": loading}
    return resolve(config.model_copy(update=updates), "eval")


def labeled(
    checkpoints: Sequence[Checkpoint], plans: Sequence[RunPlan], results: ResultFolder
) -> list[tuple[Checkpoint, RunPlan, str]]:
    """Return the checkpoints with labels that no results of other folders have, and digests."""
    digests = [digest(checkpoint) for checkpoint in checkpoints]
    labels = [checkpoint.label for checkpoint in checkpoints]
    folders = results.folders(dict(zip(labels, digests, strict=True)))
    named = with_unique_labels(checkpoints, folders)
    return list(zip(named, plans, digests, strict=True))


def evaluation_settings(
    plan: RunPlan, hf_dir: Path, max_model_len: int, max_num_seqs: int
) -> EngineSettings:
    """Return the settings of an engine that gets the weights of one checkpoint after the other."""
    settings = engine_settings(
        plan.config,
        hf_dir,
        dtype=plan.dtype,
        logits_dtype=plan.config.model.logits_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        random_weights=True,
    )
    return replace(settings, tokenizer_dir=plan.tokenizer_dir, images=data_images(plan))


class SharedEngine:
    """Context with one engine, which is replaced for a checkpoint of another shape."""

    def __init__(self, max_model_len: int, max_num_seqs: int) -> None:
        self._limits = max_model_len, max_num_seqs
        self._current: tuple[tuple[Shape, str], VllmEngine] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> SharedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, model: EvaluatedModel) -> VllmEngine:
        """Return the engine with the weights of a checkpoint."""
        source = open_checkpoint(model.checkpoint)
        plan = model.plan
        kind = source.shape, vocab_hash(open_tokenizer(plan.tokenizer_dir).get_vocab())
        if self._current is not None and self._current[0] == kind:
            engine = self._current[1]
            engine.load_weights(hf_weights(source))
            return engine
        self._stack.close()
        settings = evaluation_settings(plan, source.hf_dir, *self._limits)
        engine = self._stack.enter_context(running_engine(plan.config, source, settings))
        self._current = kind, engine
        return engine
