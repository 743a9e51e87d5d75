"""What the ranks of the distributed-checkpoint test do: Megatron's own GPTModel, by its own layer spec, loads what we wrote and saves.

Imported by rank processes after `platform.prepare()`, by name (`dist_ranks:main`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msrl.models.shape import Shape
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout


@dataclass(frozen=True)
class Case:
    """A Hugging Face folder, the iteration folder made from it, the layout that loads it, and the folder that Megatron saves to."""

    name: str
    hf: Path
    iteration: Path
    layout: Layout
    save: Path


def main(context: RankContext, cases: list[Case]) -> None:
    """Every case; each rank reports (name, coordinates, number of weights that are equal, names of those that differ)."""
    from megatron.core import dist_checkpointing

    from msrl import platforms
    from msrl.checkpoint.source import open_weights
    from msrl.trainer import groups

    for number, case in enumerate(cases):
        groups.initialize(
            platforms.get("cpu"), rank=context.rank, world_size=context.world_size, init_method=f"{context.init_method}-{number}",
            layout=case.layout, seed=0, timeout_s=120,
        )  # fmt: skip
        source = open_weights(case.hf)
        model = _megatron_model(source.shape, case.layout)
        _load(model, case.iteration)
        stage, rank = divmod(context.rank, context.world_size // case.layout.pp)
        at = case.layout.coords(stage, rank)
        wanted = dict(source.local_tensors(case.layout, at, torch.float32))
        found = dict(model.named_parameters()) | {name: value for name, value in model.named_buffers() if name in wanted}
        wrong = sorted(name for name in found.keys() | wanted.keys() if not _equal(found.get(name), wanted.get(name)))
        context.report((case.name, tuple(at), len(found) - len(wrong), wrong))
        if context.rank == 0:
            case.save.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save({"iteration": 7, "model": model.sharded_state_dict(metadata={})}, str(case.save), content_metadata={})
        groups.shutdown()


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _load(model: Any, folder: Path) -> None:
    """As Megatron's training does: the shapes of this rank's parts are asked for under their global names."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    state: Any = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(folder))
    model.load_state_dict(state["model"])


def _megatron_model(shape: Shape, layout: Layout) -> Any:
    """Megatron's GPTModel by its local layer spec, where nothing is ours."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from msrl.trainer.megatron import transformer_config

    config = transformer_config(shape, layout, torch.float32, torch.device("cpu"))
    config.sequence_parallel = False  # which the norms of the local spec refuse; weights are cut the same
    if shape.moe is not None and all(shape.moe.layers):
        config.moe_layer_freq = 1
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab_size(layout.tp),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
    )
