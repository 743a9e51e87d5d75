"""Makes a small random model with the tokenizer and the vocabulary of a Qwen2.5 model, to try the whole pipeline on a laptop.

    python examples/gsm8k/make_small_model.py --like Qwen2.5-0.5B-Instruct --out runs/gsm8k-laptop/model

`--like` is a folder with config.json and the files of the tokenizer; weights need not be there. All that is not size is kept: vocabulary,
tied or untied embeddings, biases, rotary base, two KV heads. Two layers of width 128 are left, in float32: 19.7 million parameters for
Qwen2.5-0.5B, nearly all of them in the embedding.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_window_layers": 2,
    "layer_types": None,  # derived anew from the number of layers
}
CARRIED_ALONG = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def make_small_model(like: Path, out: Path, seed: int) -> int:
    """Write the folder `out`, which appears whole or not at all. Returns the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    config = Qwen2Config.from_dict(
        {**Qwen2Config.from_pretrained(like).to_dict(), **SIZES, "dtype": "float32"}
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(beside)
    for name in CARRIED_ALONG:
        if (like / name).exists():
            shutil.copyfile(like / name, beside / name)
    beside.rename(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make a small random model with the tokenizer and vocabulary of a Qwen2.5 model."
    )
    parser.add_argument(
        "--like",
        type=Path,
        required=True,
        help="folder of a Qwen2.5 model; its weights are not needed",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.like / "config.json").is_file():
        parser.error(
            f"--like {arguments.like}: holds no config.json; name the folder of a Qwen2.5 model"
        )
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already; remove it or name another folder")
    count = make_small_model(arguments.like, arguments.out, arguments.seed)
    print(f"{arguments.out}: a random model of {count:,} parameters")


if __name__ == "__main__":
    main()
