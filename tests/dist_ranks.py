"""What the ranks of the distributed-checkpoint test do: Megatron's own GPTModel, by its own layer spec, loads what we wrote and saves.

Imported by rank processes after `platform.prepare()`, by name (`dist_ranks:main`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from msrl.models.shape import Mla, Shape
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
        wanted = _as_megatron_has_it(
            dict(source.local_tensors(case.layout, at, torch.float32)),
            source.shape,
            case.layout.tp,
            at.tp,
        )
        found = dict(model.named_parameters()) | {
            name: value for name, value in model.named_buffers() if name in wanted
        }
        wrong = sorted(
            name
            for name in found.keys() | wanted.keys()
            if not _equal(found.get(name), wanted.get(name))
        )
        context.report((case.name, tuple(at), len(found) - len(wrong), wrong))
        if context.rank == 0:
            case.save.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(
            {"iteration": 7, "model": model.sharded_state_dict(metadata={})},
            str(case.save),
            content_metadata={},
        )
        groups.shutdown()


def _as_megatron_has_it(
    tensors: dict[str, torch.Tensor], shape: Shape, tp: int, rank: int
) -> dict[str, torch.Tensor]:
    """Of latent attention Megatron's local spec cuts what comes from the token itself, the queries apart from the rest."""
    if shape.mla is None:
        return tensors
    found = dict(tensors)
    name = "linear_q_proj" if shape.mla.q_lora_rank is None else "linear_q_down_proj"
    for joined in [name for name in tensors if name.endswith("linear_qkv.weight")]:
        latent = shape.mla.kv_lora_rank + shape.mla.rope_head_dim
        queries, rest = found.pop(joined).split([len(tensors[joined]) - latent, latent])
        found[joined.replace("linear_qkv", name)] = queries.chunk(tp)[rank]
        found[joined.replace("linear_qkv", "linear_kv_down_proj")] = rest.chunk(tp)[rank]
    return found


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _load(model: Any, folder: Path) -> None:
    """As Megatron's training does: the shapes of this rank's parts are asked for under their global names."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    state: Any = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, str(folder)
    )
    model.load_state_dict(state["model"])


def _latent(config: Any, mla: Mla) -> Any:
    """The settings with those that latent attention has of its own."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    found = MLATransformerConfig(
        num_layers=config.num_layers, num_attention_heads=config.num_attention_heads, q_lora_rank=cast("int", mla.q_lora_rank),
        kv_lora_rank=mla.kv_lora_rank, qk_head_dim=mla.nope_head_dim, qk_pos_emb_head_dim=mla.rope_head_dim, v_head_dim=mla.v_head_dim,
    )  # fmt: skip
    vars(found).update({**vars(config), "multi_latent_attention": True, "qk_layernorm": True})
    return found


def _megatron_model(shape: Shape, layout: Layout) -> Any:
    """Megatron's GPTModel by its local layer spec, where nothing is ours."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp

    from msrl.trainer.model.build import transformer_config

    config = transformer_config(shape, layout, torch.float32, torch.device("cpu"))
    config.sequence_parallel = (
        False  # which the norms of the local spec refuse; weights are cut the same
    )
    if shape.moe is not None and all(shape.moe.layers):
        config.moe_layer_freq = 1
    if shape.mla is not None:
        config = _latent(config, shape.mla)
        # An upstream slip: without Transformer Engine it asks whether a layer is an instance of what is no class.
        multi_latent_attention.TELinear = type("Absent", (), {})
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    if shape.mla is not None:
        for layer in (
            spec.layer_specs
        ):  # Megatron's own attention takes no values narrower than keys; it has no weights
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
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
