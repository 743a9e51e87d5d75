"""A view of many samples: the same rows in every step."""

from __future__ import annotations

import json
from pathlib import Path

import view_runs
from msrl.workflows.view.build import write_folder


def write_big_view(output: Path, *, num_steps: int, samples_per_step: int) -> None:
    """Write a view with `num_steps` files of samples, which are links to one file."""
    run = view_runs.make_run(output.parent / "big", num_steps=1)
    path = run / "rollouts" / "step_000001.jsonl"
    text = "x" * 600
    rows = [
        view_runs.jsonl_row(
            f"{text} {number} \\boxed{{{14 + number % 2}}}",
            number // 4,
            response_ids=[number % 250] * 60,
            logprobs=[-0.01 * (i % 7) for i in range(60)],
        )
        for number in range(samples_per_step)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(2, num_steps + 1):
        path.with_name(f"step_{step:06d}.jsonl").hardlink_to(path)
    write_folder([run], output)
