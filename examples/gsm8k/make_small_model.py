"""Create a small random model with a Qwen2.5 tokenizer, to try the full pipeline on a laptop.

    python examples/gsm8k/make_small_model.py --like Qwen2.5-0.5B-Instruct --out runs/model

`--like` is a folder with config.json and the tokenizer files; it needs no weights. The new model
keeps everything except the sizes: vocabulary, tied or untied embeddings, biases, rotary base and
two KV heads. It has two layers of width 128 in float32: 19.7 million parameters for Qwen2.5-0.5B,
nearly all of them in the embedding.
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
    "layer_types": None,  # transformers derives it from the number of layers
}
COPIED_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def make_small_model(like: Path, out: Path, seed: int) -> int:
    """Write the model atomically into the folder `out` and return its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = Qwen2Config.from_dict(
        {**Qwen2Config.from_pretrained(like).to_dict(), **SIZES, "dtype": "float32"}
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(partial)
    for name in COPIED_FILES:
        if (like / name).exists():
            shutil.copyfile(like / name, partial / name)
    partial.rename(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Create a small random model with a Qwen2.5 tokenizer."
    )
    parser.add_argument(
        "--like",
        type=Path,
        required=True,
        help="Folder of a Qwen2.5 model. Its weights are not needed.",
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder to create.")
    parser.add_argument(
        "--seed", type=int, default=0, help="Random seed of the weights (default: %(default)s)."
    )
    arguments = parser.parse_args()
    if not (arguments.like / "config.json").is_file():
        parser.error(
            f"--like {arguments.like}: no config.json there. Specify the folder of a Qwen2.5 model."
        )
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already. Remove it or specify another folder.")
    count = make_small_model(arguments.like, arguments.out, arguments.seed)
    print(f"Saved a random model with {count:,} parameters to {arguments.out}")


if __name__ == "__main__":
    main()
