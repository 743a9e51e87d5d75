"""Speed of TRL's GRPOTrainer on GSM8K's prompts, 8 prompts x 8 samples x 128 tokens, bfloat16.

The peers' Python runs it: `trl_laptop_grpo.py INPUTS [--steps N]`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import load_dataset
from step_seconds import StepSeconds
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SETTLE_STEPS = 1


def share_of_digits(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Return a reward that differs within a group."""
    texts = [turns[0]["content"] for turns in completions]
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = f"{args.inputs}/tiny"
    config = GRPOConfig(
        output_dir=f"{args.inputs}/out_trl_grpo",
        max_steps=args.steps,
        # Batches of 64 took more than 23 GB: TRL keeps the float32 logits of all tokens.
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=128,
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,  # the weights are bfloat16
        gradient_checkpointing=False,
        temperature=1.0,
        beta=0.0,
        seed=0,
    )
    steps = StepSeconds()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=load_dataset("json", data_files=f"{args.inputs}/grpo.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[steps],
    )
    trainer.train()
    rows = trainer.state.log_history
    lengths = [row["completions/mean_length"] for row in rows if "completions/mean_length" in row]
    step_s = statistics.median(steps.seconds[SETTLE_STEPS:])
    print(json.dumps({"peer": "trl_grpo", "step_s": step_s, "length": statistics.mean(lengths)}))


if __name__ == "__main__":
    main()
