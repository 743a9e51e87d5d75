"""The training commands: msrl train-sft, train-dpo, train-rm, train-grpo and train-distill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer

from msrl.cli.execute import execute
from msrl.cli.help import examples
from msrl.cli.options import APPROXIMATE, CONFIG, CONFIG_NAME, DRY_RUN, SETS, VERBOSE, takes


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """Name and help of a training command. All training commands have the same options."""

    name: str
    summary: str
    epilog: str


TRAINING_COMMANDS = (
    TrainingCommand(
        "train-sft",
        "Fine-tune a model on examples or text, with Megatron.",
        examples(
            "msrl train-sft -c sft.yaml --dry-run",
            "msrl train-sft -c sft.yaml --model Qwen2.5-0.5B --data data/sft --lr 1e-5",
            "msrl train-sft -c sft.yaml --set train.lora.rank=8 --resume auto",
        ),
    ),
    TrainingCommand(
        "train-dpo",
        "Train a model on preference data with DPO, IPO, SimPO, ORPO, KTO or CPO.",
        examples(
            "msrl train-dpo -c dpo.yaml --dry-run",
            "msrl train-dpo -c dpo.yaml --model runs/sft/hf --data data/pairs --lr 5e-7",
            "msrl train-dpo -c dpo.yaml --set algo.preference.loss=simpo",
        ),
    ),
    TrainingCommand(
        "train-rm",
        "Train a reward model on preference pairs or on labeled steps.",
        examples(
            "msrl train-rm -c rm.yaml --dry-run",
            "msrl train-rm -c rm.yaml --model runs/sft/hf --data data/pairs --lr 1e-5",
        ),
    ),
    TrainingCommand(
        "train-grpo",
        "Train a model with GRPO or another RL algorithm, using vLLM and Megatron.",
        examples(
            "msrl train-grpo -c grpo.yaml --dry-run",
            "msrl train-grpo -c grpo.yaml --model runs/sft/checkpoints --name dapo \\",
            "    --set algo.preset=dapo",
            "msrl train-grpo -c grpo.yaml --resume auto",
        ),
    ),
    TrainingCommand(
        "train-distill",
        "Distill teachers into a model on its own samples, using vLLM and Megatron.",
        examples(
            "msrl train-distill -c distill.yaml --dry-run",
            "msrl train-distill -c distill.yaml --model small --data data/rl --lr 1e-5",
            "msrl train-distill -c distill.yaml --set algo.distill.divergence=forward_kl",
        ),
    ),
)


def training_function(command: str) -> Callable[..., None]:
    """Return the function that typer calls for a training command."""

    @takes(CONFIG, CONFIG_NAME, SETS, APPROXIMATE, command, DRY_RUN, VERBOSE)
    def train(ctx: typer.Context) -> None:
        execute(ctx, command)

    return train
