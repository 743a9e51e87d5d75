"""A tiny model that says one of a few texts, so that rewards differ between its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiny_qwen2 import make_model, make_tokenizer

MARGIN = 12.0  # of the logits of the tokens that the model says


def save_answering_model(
    folder: Path, texts: Sequence[str], *, specials: Sequence[str] = ()
) -> None:
    """Write a model that answers with a text, each of them equally likely, and some line breaks.

    Each text is one token. The next token depends on the last one only, since the outputs of all
    layers are 0 before a training.
    """
    import torch

    tokenizer, model = make_tokenizer(), make_model(tied=False, positions=2048)
    tokenizer.add_tokens(list(texts))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(specials), "bos_token": "<|endoftext|>"}
    )
    answers = tokenizer.convert_tokens_to_ids(list(texts))
    prompt_end, line_break = tokenizer.encode("\n")[-1], tokenizer.encode("\t")[-1]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.mul_(0.1)
        size = embedding.shape[1] ** 0.5  # length of a normalized vector
        says, ends = torch.eye(2, embedding.shape[1])
        embedding[prompt_end], embedding[[*answers, line_break]] = says, ends
        head[answers] = MARGIN / size * says
        head[[line_break, tokenizer.eos_token_id]] = MARGIN / size * ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
