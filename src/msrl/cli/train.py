"""msrl train-sft and msrl train-grpo."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute


def train_sft(
    ctx: typer.Context,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    resume: o.Resume = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Supervised fine-tuning of a model with Megatron."""
    execute(ctx, "train-sft")


def train_grpo(
    ctx: typer.Context,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    resume: o.Resume = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Reinforcement learning with vLLM, verifiers and Megatron."""
    execute(ctx, "train-grpo")
