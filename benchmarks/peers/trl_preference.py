"""Speed of TRL's DPOTrainer and RewardTrainer on 8 pairs, in seconds per step.

The peers' Python runs it: `trl_preference.py INPUTS dpo|reward [--steps N]`; it prints one line of
JSON. DPO computes the reference in every step, as msrl's benchmark does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import load_dataset
from step_seconds import StepSeconds
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

SETTLE_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs")
    parser.add_argument("objective", choices=("dpo", "reward"))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(2)
    options: dict[str, Any] = {
        "output_dir": f"{args.inputs}/out_trl_{args.objective}",
        "max_steps": args.steps,
        "per_device_train_batch_size": 8,
        "max_length": 512,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    steps = StepSeconds()
    trainer = make_trainer(args.objective, f"{args.inputs}/tiny", options)(
        train_dataset=load_dataset("json", data_files=f"{args.inputs}/pairs.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained(f"{args.inputs}/tiny"),
        callbacks=[steps],
    )
    trainer.train()
    step_s = statistics.median(steps.seconds[SETTLE_STEPS:])
    print(json.dumps({"peer": f"trl_{args.objective}", "step_s": step_s}))


def make_trainer(objective: str, model: str, options: dict[str, Any]) -> Any:
    """Return a function that makes the trainer of an objective from its remaining arguments."""
    load: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if objective == "dpo":
        policy = AutoModelForCausalLM.from_pretrained(model, **load)
        return lambda **arguments: DPOTrainer(
            model=policy, args=DPOConfig(beta=0.1, **options), **arguments
        )
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **load)
    return lambda **arguments: RewardTrainer(
        model=scorer, args=RewardConfig(**options), **arguments
    )


if __name__ == "__main__":
    main()
