"""A view of many samples, written without a run: the same rows in every step."""

from __future__ import annotations

import json
from pathlib import Path

import view_runs
from msrl.workflows.view.build import write_folder
from msrl.workflows.view.chunks import FolderChunks


def write_big_view(output: Path, *, num_steps: int, samples_per_step: int) -> None:
    """Write a view with `num_steps` files of samples, copied from one step."""
    run = view_runs.make_run(output.parent / "big", num_steps=1)
    path = run / "rollouts" / "step_000001.jsonl"
    text = "x" * 600
    rows = [
        view_runs.jsonl_row(f"{text} {number} \\boxed{{{14 + number % 2}}}", number // 4)
        for number in range(samples_per_step)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_folder([run], output)
    data = output / "data" / "0"
    entry = _entry(output)
    files = [*data.glob("rollout-000001-*.js")]
    entries = []
    for step in range(1, num_steps + 1):
        name = f"0/rollout-{step:06d}"
        for file in files:
            copied = file.read_text().replace("0/rollout-000001", name)
            (data / file.name.replace("000001", f"{step:06d}")).write_text(copied)
        entries.append({**entry, "name": name, "step": step})
    overview = _runs(output)
    overview[0]["tables"]["rollout"] = entries
    FolderChunks(output).add("runs", overview)


def _runs(output: Path) -> list[dict[str, object]]:
    text = (output / "data" / "runs.js").read_text()
    return json.loads(text[len('msrlChunk("runs",') : -len(");\n")])


def _entry(output: Path) -> dict[str, object]:
    tables: dict[str, list[dict[str, object]]] = _runs(output)[0]["tables"]  # type: ignore[assignment]
    return tables["rollout"][0]
