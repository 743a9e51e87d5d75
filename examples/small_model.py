"""Small random model and tokenizer of the examples, which run on a laptop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_tokenizer(
    folder: Path,
    texts: Iterable[str],
    *,
    special_tokens: Sequence[str],  # the first one pads
    eos_token: str,
    chat_template: str,
    vocab_size: int,
) -> int:
    """Write a byte-level BPE tokenizer and return the id of its EOS token.

    Every digit is a token. The tokenizer has at most `vocab_size` tokens; uniform text gives fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(eos_token)
    if end is None:
        raise ValueError(f"special_tokens: {eos_token} is missing")
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        eos_token=eos_token,
        pad_token=special_tokens[0],
    )
    saved.chat_template = chat_template
    saved.save_pretrained(str(folder))
    _set_portable_tokenizer_class(folder / "tokenizer_config.json")
    return end


def _set_portable_tokenizer_class(path: Path) -> None:
    """Replace the class name that transformers 5 writes by one that transformers 4 also knows."""
    config = {
        **json.loads(path.read_text(encoding="utf-8")),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(
    folder: Path,
    *,
    vocab_size: int,
    eos_token_id: int,
    seed: int,
    **changes: int,  # of the config, such as hidden_size
) -> None:
    """Write a random Qwen2 model in float32, by default with about 435k parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = Qwen2Config(
        vocab_size=vocab_size,
        **{**sizes, **changes},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(str(folder))


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
