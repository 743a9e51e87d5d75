"""Rank code of the distributed-checkpoint test: Megatron's GPTModel loads and saves checkpoints.

It has Megatron's layer spec and loads what msrl wrote. Rank processes import it by name
(`dist_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from msrl.models.shape import Mla, Shape
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout
from support import HANG_S


@dataclass(frozen=True)
class Case:
    """Hugging Face folder, iteration folder made from it, layout, and folder of Megatron's save."""

    name: str
    hf: Path
    iteration: Path
    layout: Layout
    save: Path


def main(context: RankContext, cases: list[Case]) -> None:
    """Run every case.

    Each rank reports (name, coordinates, number of equal weights, names of differing weights).
    """
    from megatron.core import dist_checkpointing

    from msrl import platforms
    from msrl.checkpoint.source import open_weights
    from msrl.trainer import groups

    for number, case in enumerate(cases):
        groups.initialize(
            platforms.get("cpu"),
            rank=context.rank,
            world_size=context.world_size,
            init_method=f"{context.init_method}-{number}",
            layout=case.layout,
            seed=0,
            timeout_s=HANG_S,
        )
        source = open_weights(case.hf)
        model = _megatron_model(source.shape, case.layout)
        _load(model, case.iteration)
        stage, rank = divmod(context.rank, context.world_size // case.layout.pp)
        at = case.layout.coords(stage, rank)
        expected = _megatron_tensors(
            dict(source.local_tensors(case.layout, at, torch.float32)),
            source.shape,
            case.layout.tp,
            at.tp,
        )
        actual = dict(model.named_parameters()) | {
            name: value for name, value in model.named_buffers() if name in expected
        }
        wrong = sorted(
            name
            for name in actual.keys() | expected.keys()
            if not _equal(actual.get(name), expected.get(name))
        )
        context.report((case.name, tuple(at), len(actual) - len(wrong), wrong))
        if context.rank == 0:
            case.save.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(
            {"iteration": 7, "model": model.sharded_state_dict(metadata={})},
            str(case.save),
            content_metadata={},
        )
        groups.shutdown()


def _megatron_tensors(
    tensors: dict[str, torch.Tensor], shape: Shape, tp: int, rank: int
) -> dict[str, torch.Tensor]:
    """Convert the tensors to the tensors of Megatron's local spec.

    For latent attention, that spec shards the down projections and separates queries from keys and
    values.
    """
    if shape.mla is None:
        return tensors
    converted = dict(tensors)
    name = "linear_q_proj" if shape.mla.q_lora_rank is None else "linear_q_down_proj"
    for joined in [name for name in tensors if name.endswith("linear_qkv.weight")]:
        latent = shape.mla.kv_lora_rank + shape.mla.rope_head_dim
        queries, kv = converted.pop(joined).split([len(tensors[joined]) - latent, latent])
        converted[joined.replace("linear_qkv", name)] = queries.chunk(tp)[rank]
        converted[joined.replace("linear_qkv", "linear_kv_down_proj")] = kv.chunk(tp)[rank]
    return converted


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _load(model: Any, folder: Path) -> None:
    """Load like Megatron's training, which requests this rank's shards by their global names."""
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
    """Return the settings with the settings of latent attention."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent = MLATransformerConfig(
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        q_lora_rank=cast("int", mla.q_lora_rank),
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.nope_head_dim,
        qk_pos_emb_head_dim=mla.rope_head_dim,
        v_head_dim=mla.v_head_dim,
    )
    vars(latent).update({**vars(config), "multi_latent_attention": True, "qk_layernorm": True})
    return latent


def _megatron_model(shape: Shape, layout: Layout) -> Any:
    """Return Megatron's GPTModel with its local layer spec, without any module of msrl."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp

    from msrl.trainer.model.build import transformer_config

    config = transformer_config(shape, layout, torch.float32, torch.device("cpu"))
    # Norms of the local spec reject sequence parallelism; shards of weights do not depend on it.
    config.sequence_parallel = False
    if all(shape.mixture_layers):
        config.moe_layer_freq = 1
    if shape.mla is not None:
        config = _latent(config, shape.mla)
        # Upstream bug: without Transformer Engine, isinstance is called with None as TELinear.
        multi_latent_attention.TELinear = type("Absent", (), {})
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    if shape.mla is not None:
        # Megatron's core attention rejects values narrower than keys. It has no weights.
        for layer in spec.layer_specs:
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
