"""Speed of TRL's SFTTrainer with packing on GSM8K, in tokens of examples per second.

Padding is not counted. The peers' Python runs it: `trl_lengths.py INPUTS [--steps N]`; it prints
one line of JSON. Only the assistant's turns are trained, as in msrl's benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import load_dataset
from step_seconds import StepSeconds
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

SETTLE_STEPS = 4


class Counted:
    """Collator that records the number of example tokens in each batch."""

    def __init__(self, collate: Callable[[Any], Any], pad_token_id: int) -> None:
        self.collate, self.pad_token_id = collate, pad_token_id
        self.tokens: list[int] = []

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        self.tokens.append(int((batch["input_ids"] != self.pad_token_id).sum()))
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows = load_dataset("json", data_files=f"{args.inputs}/sft.jsonl", split="train")
    tokenizer = AutoTokenizer.from_pretrained(f"{args.inputs}/tiny")
    model = AutoModelForCausalLM.from_pretrained(
        f"{args.inputs}/tiny", dtype=torch.float32, attn_implementation="sdpa"
    )
    config = SFTConfig(
        output_dir=f"{args.inputs}/out_trl_sft",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        max_length=512,
        packing=True,
        packing_strategy="bfd",
        assistant_only_loss=True,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    )
    steps = StepSeconds()
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[steps]
    )
    trainer.data_collator = counted = Counted(trainer.data_collator, tokenizer.pad_token_id)
    trainer.train()
    later = slice(SETTLE_STEPS, args.steps)
    seconds, tokens = steps.seconds[later], counted.tokens[later]
    print(
        json.dumps(
            {
                "peer": "trl",
                "tokens_per_s": sum(tokens) / sum(seconds),
                "step_s": sum(seconds) / len(seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
