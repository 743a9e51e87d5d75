"""A random Qwen2 with about 200,000 parameters and a byte-level ChatML tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 288  # 3 special tokens, 256 bytes, and padding that no text uses


def make_tokenizer(chat_template: bool = True, more: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer with one token per UTF-8 byte, and `more` special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = (*SPECIALS, *more)
    bpe = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate((*specials, *alphabet))}, merges=[])
    )
    bpe.add_special_tokens(list(specials))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    if chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer


def make_model(*, tied: bool, seed: int = 0, head_dim: int = 32, positions: int = 512) -> Any:
    """Return a Qwen2ForCausalLM in fp32 with weights that give clearly different logits."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=4 * head_dim,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def save_model(
    folder: Path, *, tied: bool, seed: int = 0, positions: int = 512, chat_template: bool = True
) -> Any:
    """Write model and tokenizer to `folder` and return the model."""
    model = make_model(tied=tied, seed=seed, positions=positions)
    model.save_pretrained(folder)
    make_tokenizer(chat_template).save_pretrained(folder)
    return model
