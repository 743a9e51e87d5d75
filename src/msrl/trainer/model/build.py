"""Construction of Megatron's model from a Shape: configuration, layers and wrapper."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from msrl.config.sections.train import RecomputeConfig
from msrl.models.indexer import choosing_layer
from msrl.models.megatron import transformer_settings
from msrl.models.parallel_layout import Coords
from msrl.models.rules import Replicated, Sharded
from msrl.models.select import frozen_names
from msrl.models.shape import Attention, DeltaNet, Layer, Mla, Moe, Shape
from msrl.models.stages import stage_tensors
from msrl.platforms.base import Platform
from msrl.trainer.model.experts import MixtureLayer, mixture_spec
from msrl.trainer.model.gpt import PolicyModel
from msrl.trainer.model.layers import (
    ACTIVATIONS,
    NORMS,
    AllHeadsAttention,
    CoreAttention,
    DeepstackLayer,
    GatedMlp,
    ParallelLayer,
    PostNormLayer,
    RmsNorm,
    scaled_addition,
)
from msrl.trainer.model.mixers.gated_attention import GatedAttention
from msrl.trainer.model.mixers.gated_delta import GatedDeltaNet
from msrl.trainer.model.mixers.latent_attention import LatentAttention
from msrl.trainer.model.mixers.sparse_attention import SparseAttention
from msrl.trainer.model.pipeline import EmptyLayer, VirtualStages, virtual_stages
from msrl.trainer.model.seams import check_seams_once
from msrl.trainer.model.vision.images import is_trained
from msrl.trainer.settings import Layout, ReplicaSettings, sequence_multiple

NO_RECOMPUTE = RecomputeConfig()


def transformer_config(
    shape: Shape,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    recompute: RecomputeConfig = NO_RECOMPUTE,
) -> TransformerConfig:
    """Return Megatron's configuration of a shape."""
    settings = {**transformer_settings(shape), "num_layers": layout.num_positions(shape.num_layers)}
    if shape.moe is not None:
        kinds = settings["moe_layer_freq"]
        settings["moe_layer_freq"] = [
            0 if layer is None else kinds[layer] for layer in layout.positions(shape.num_layers)
        ]
    num_chunks = layout.num_chunks(shape.num_layers)
    config = TransformerConfig(
        **{
            **settings,
            "activation_func": ACTIVATIONS[settings["activation_func"]],
            "add_bias_linear": False,
        },
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        pipeline_model_parallel_layout=_uneven(layout),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=sequence_multiple(layout, shape) > 1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Otherwise Megatron creates weights on `torch.cuda.current_device()`.
        use_cpu_initialization=device.type == "cpu",
        # Every weight is filled from a checkpoint or by `RandomSource`.
        perform_initialization=False,
        # Pipeline stages exchange the sizes of tensors: packed micro-batches differ in length.
        variable_seq_lengths=True,
        # The default refuses sequences of differing lengths, even without experts.
        moe_token_dispatcher_type="alltoall",
        # Otherwise the schedules divide each loss by the number of micro-batches.
        calculate_per_token_loss=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # It needs a CUDA extension of Apex (ColumnParallelLinear.__init__).
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        **_recompute_settings(recompute),
    )
    # Megatron refuses biases of split experts, which it would add once per shard. `ExpertOutput`
    # adds them once.
    config.add_bias_linear = shape.output_bias
    return config


def _recompute_settings(recompute: RecomputeConfig) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.layers,
    }


def _uneven(layout: Layout) -> PipelineParallelLayerLayout | None:
    """Return Megatron's description of stages of different sizes."""
    if layout.num_layer_list is None:
        return None
    stages = [["decoder"] * count for count in layout.num_layer_list]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return PipelineParallelLayerLayout(stages, layout.pp)


def _layer_spec(shape: Shape, layer: int) -> ModuleSpec:
    """Return the modules of a layer; `layer` counts from 0 over the whole model."""
    block, norm = shape.layers[layer].feed_forward, NORMS[shape.norm]
    pre_norm = norm if shape.pre_norms else IdentityOp
    add = get_bias_dropout_add
    if shape.residual_scale != 1:
        add = scaled_addition(shape.residual_scale)
    adds_features = shape.vision is not None and layer < len(shape.vision.deepstack)
    return ModuleSpec(
        module=_layer_class(shape, shape.layers[layer], adds_features=adds_features),
        params={"number": layer} if adds_features else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=pre_norm,
            self_attention=_mixer_spec(shape, layer),
            self_attn_bda=add,  # pyright: ignore[reportArgumentType] - Megatron's own, by its own spec
            pre_mlp_layernorm=IdentityOp if shape.parallel_blocks else pre_norm,
            mlp=(
                mixture_spec(block, sum(shape.mixture_layers[:layer]))
                if isinstance(block, Moe)
                else GatedMlp
            ),
            mlp_bda=add,  # pyright: ignore[reportArgumentType]
        ),
    )


def _layer_class(shape: Shape, layer: Layer, *, adds_features: bool) -> type[TransformerLayer]:
    is_mixture = isinstance(layer.feed_forward, Moe)
    is_special = shape.post_norms or shape.parallel_blocks
    assert not (is_special and (is_mixture or adds_features or shape.residual_scale != 1)), (
        "no family has norms after its sublayers, or both in parallel, and a mixture of experts, "
        "deeper features or scaled outputs"
    )
    if shape.parallel_blocks:
        return ParallelLayer
    if adds_features:
        return DeepstackMixtureLayer if is_mixture else DeepstackLayer
    if is_mixture:
        return MixtureLayer
    return PostNormLayer if shape.post_norms else TransformerLayer


class DeepstackMixtureLayer(DeepstackLayer, MixtureLayer):
    """Layer with experts, after which deeper features of images are added."""


def _mixer_spec(shape: Shape, layer: int) -> ModuleSpec:
    """Return the module in the place of Megatron's self-attention."""
    mixer = shape.layers[layer].mixer
    if isinstance(mixer, Mla) and mixer.indexer is not None:
        params = {"mla": mixer, "chooser": choosing_layer(shape, layer)}
        return ModuleSpec(module=SparseAttention, params=params)
    if isinstance(mixer, Mla):
        return ModuleSpec(module=LatentAttention, params={"mla": mixer})
    if isinstance(mixer, DeltaNet):
        return ModuleSpec(module=GatedDeltaNet, params={"delta": mixer})
    return _attention_spec(mixer)


def _attention_spec(attention: Attention) -> ModuleSpec:
    norm = RmsNorm if attention.qk_norm == "head" else IdentityOp
    core_attention = ModuleSpec(module=CoreAttention, params={"attention": attention})
    module = GatedAttention if attention.output_gate else SelfAttention
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    if attention.qk_norm == "all":
        module, params["attention"] = AllHeadsAttention, attention
    return ModuleSpec(
        module=module,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
            core_attention=core_attention,
        ),
    )


def build_model(
    shape: Shape,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    padded_vocab_size: int,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    logits_dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Return this rank's shard of the model without weights.

    It is a PolicyModel, or `VirtualStages` if the rank has several virtual pipeline stages. Its
    output layer computes in `logits_dtype`, or in `dtype` for None.
    Parameters have the names of `stage_tensors`.

    Raises:
        MsrlError: Megatron's internals have changed.
    """
    check_seams_once()
    config = transformer_config(shape, layout, dtype, device, recompute)
    chunks = layout.chunks(shape.num_layers, parallel_state.get_pipeline_model_parallel_rank())
    models = [
        _build_chunk(
            shape, config, number, len(chunks), layers, padded_vocab_size, logits_dtype or dtype
        )
        for number, layers in enumerate(chunks)
    ]
    model = models[0] if len(models) == 1 else VirtualStages(models)
    _mark_shards(model, shape, layout)
    # Weights without memory (see `streaming`) cannot be moved.
    return model if device.type == "cpu" else model.to(device)


def _build_chunk(
    shape: Shape,
    config: TransformerConfig,
    number: int,
    num_chunks: int,
    layers: Sequence[int | None],
    padded_vocab_size: int,
    logits_dtype: torch.dtype,
) -> PolicyModel:
    """Return one virtual stage of this rank.

    `layers` are the numbers of its layers in the model; None is an empty position.
    """
    is_first = parallel_state.is_pipeline_first_stage() and number == 0
    is_last = parallel_state.is_pipeline_last_stage() and number == num_chunks - 1
    specs = [
        ModuleSpec(module=EmptyLayer) if layer is None else _layer_spec(shape, layer)
        for layer in layers
    ]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=NORMS[shape.norm])  # pyright: ignore[reportArgumentType] - a class is taken too
    model = PolicyModel(
        shape=shape,
        logits_dtype=logits_dtype,
        config=config,
        transformer_layer_spec=block,  # pyright: ignore[reportArgumentType]
        vocab_size=padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="none",
        vp_stage=number if num_chunks > 1 else None,
    )
    if is_first:
        model.embedding.register_forward_hook(_with_gradient)
    if is_last and not shape.reward_head:
        # The sequence is gathered before positions are selected, hence before this layer.
        model.output_layer.sequence_parallel = False
    return model


def _with_gradient(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Make the embeddings require a gradient.

    Megatron's recomputation needs an input that requires one, and frozen embeddings do not.
    """
    return (
        output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
    )


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that checkpoints contain.

    These are its parameters and the saved buffers (biases of experts).
    """
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _mark_shards(model: torch.nn.Module, shape: Shape, layout: Layout) -> None:
    """Mark the split parameters for Megatron's gradient norm.

    Megatron marks only the parameters that it initializes.
    """
    weights = named_weights(model)
    at = Coords(
        0,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    for placed in stage_tensors(shape, layout, at):
        form, _ = placed.rule.unpacked
        if not isinstance(form, Replicated):
            mark_shard(weights[placed.name], form.axis if isinstance(form, Sharded) else 0)
        if placed.rule.expert is not None:
            # Experts are data parallel over other ranks than other weights. Megatron marks them
            # only if they are distributed over ranks.
            vars(weights[placed.name]).update(allreduce=False)
            if isinstance(form, Replicated):
                mark_expert_copy(weights[placed.name])


def mark_shard(parameter: Tensor, axis: int) -> None:
    """Mark a parameter as split along `axis` over tensor-parallel ranks or ranks of an expert."""
    vars(parameter).update(tensor_model_parallel=True, partition_dim=axis, partition_stride=1)


def mark_expert_copy(parameter: Tensor) -> None:
    """Mark a parameter that all shards of one expert hold a copy of.

    Otherwise Megatron would treat it as a copy on all tensor-parallel ranks: it would sum the
    gradients of different experts, and count only the gradients of the first rank in the norm.
    """
    is_first = parallel_state.get_expert_tensor_parallel_rank() == 0
    vars(parameter).update(
        sequence_parallel=False, tensor_model_parallel=is_first, partition_dim=0, partition_stride=1
    )


def freeze(model: torch.nn.Module, shape: Shape, layout: Layout, settings: ReplicaSettings) -> None:
    """Freeze the parameters that `train.freeze` selects, and a vision tower without learning rate.

    Raises MsrlError as `models.select.frozen_names` does.
    """
    names = frozen_names(shape, settings.freeze, settings.vision.trained)
    parameters = dict(model.named_parameters())
    at = Coords(
        0,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    for placed in stage_tensors(shape, layout, at):
        if placed.rule.mcore in names:
            parameters[placed.name].requires_grad_(False)


def wrap(model: torch.nn.Module, platform: Platform) -> list[DistributedDataParallel]:
    """Return Megatron's data-parallel wrapper of each virtual stage.

    It sums gradients, since losses have global denominators.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=platform.overlap_communication,
        # `GradientGuard` decides about gradients that are not finite. Megatron would end the run.
        check_for_nan_in_grad=False,
    )
    chunks = cast("list[PolicyModel]", virtual_stages(model))
    config = chunks[0].config
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = functools.partial(_finalize)
    if platform.overlap_communication and chunks[0].pre_process:
        tower = getattr(chunks[0], "vision_model", None)
        chunks[0].touches_tower = tower is not None and is_trained(tower)
    # The schedules enter it until the last micro-batch, so that gradients are reduced once.
    config.no_sync_func = (
        wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    )  # pyright: ignore[reportAttributeAccessIssue] - Megatron takes a list too
    return wrapped


def unwrap(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Remove the hooks of `wrap`.

    They keep the model alive through autograd's nodes, which the garbage collector does not see.
    """
    for chunk in wrapped:
        for node in cast("list[Any]", chunk.grad_accs):
            # `hooks_dict_ref` returns all hooks of the node.
            hooks = node.register_hook(lambda *gradients: None).hooks_dict_ref()
            hooks.clear()
        chunk.grad_accs = []


def _finalize(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    # With a count, Megatron would divide the gradients by it: losses have their divisors already.
    finalize_model_grads(model, None, **kwargs)
