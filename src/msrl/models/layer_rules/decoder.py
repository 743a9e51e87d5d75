"""Weight rules of a decoder, derived from its layers and a family's tensor names."""

from __future__ import annotations

import functools

from msrl.models.layer_rules.attention import attention_rules
from msrl.models.layer_rules.delta import delta_rules
from msrl.models.layer_rules.feed_forward import dense_rules, mixture_rules
from msrl.models.layer_rules.latent import latent_rules
from msrl.models.layer_rules.names import EXPERTS, LLAMA, ExpertNames, Names, norm_rule
from msrl.models.rules import Replicated, Rule, Rules, Vocab
from msrl.models.shape import DeltaNet, Dense, Layer, Mla, Shape


def decoder_rules(shape: Shape, names: Names = LLAMA, experts: ExpertNames = EXPERTS) -> Rules:
    """Return the weight rules of a decoder; Megatron fuses q/k/v and gate/up."""

    @functools.cache
    def rules(layer: Layer) -> tuple[Rule, ...]:
        return _layer_rules(shape, layer, names, experts)

    return model_rules(shape, names, tuple(rules(layer) for layer in shape.layers))


def model_rules(shape: Shape, names: Names, layers: tuple[tuple[Rule, ...], ...]) -> Rules:
    """Return the rules of a model: the embedding, `layers`, the final norm and the output layer."""
    table = Vocab(shape.vocab_size), ((shape.vocab_size, shape.hidden_size),)
    head = (
        () if shape.tie_word_embeddings else (Rule("output_layer.weight", (names.head,), *table),)
    )
    final_norm = Rule(
        "decoder.final_layernorm.weight", (names.final_norm,), Replicated(), ((shape.hidden_size,),)
    )
    return Rules(
        first=(Rule("embedding.word_embeddings.weight", (names.embedding,), *table),),
        layers=layers,
        last=(final_norm, *head),
    )


def _layer_rules(
    shape: Shape, layer: Layer, names: Names, experts: ExpertNames
) -> tuple[Rule, ...]:
    """Return the rules of one layer in the order of the network.

    Those of a mixer and of a block begin with the norm before it.
    """
    mixer, block, hidden = layer.mixer, layer.feed_forward, shape.hidden_size
    if isinstance(mixer, Mla):
        mixing = latent_rules(mixer, hidden, names)
    elif isinstance(mixer, DeltaNet):
        mixing = delta_rules(mixer, hidden, names)
    else:
        mixing = attention_rules(mixer, hidden, names)
    forward = (
        dense_rules(block, hidden, names)
        if isinstance(block, Dense)
        else mixture_rules(block, hidden, names, experts)
    )
    if not shape.pre_norms:
        mixing, forward = mixing[1:], forward[1:]
    if shape.parallel_blocks:
        forward = forward[1:]
    if not shape.post_norms:
        return (*mixing, *forward)
    post_attention = norm_rule(names, "post_attn_norm", names.post_attention_norm, hidden)
    post_mlp = norm_rule(names, "post_mlp_layernorm", names.post_mlp_norm, hidden)
    return (*mixing, post_attention, *forward, post_mlp)
