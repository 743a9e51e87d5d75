"""Vision: train a small random vision-language model to count shapes, with SFT and GRPO.

    python examples/vision/run.py [--out FOLDER] [--seed N]

The script draws images and creates a Qwen2.5-VL model (shapes.py). It then runs preprocess,
train-sft, train-grpo and generate, printing each command first, and ends with a table of the
accuracy on held-out images and a page with some of them (answers.html). It needs neither an
accelerator nor the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapes import make_inputs

from msrl.rewards.verifiers.exact_match import score

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from run import Runner, read_rows, remove_previous_run  # noqa: E402  # pyright: ignore

MODELS = {
    "before": "inputs/model",
    "after SFT": "runs/sft/checkpoints",
    "after GRPO": "runs/grpo/checkpoints",
}
PAGE = "answers.html"
NUM_SHOWN = 24
KNOWN_FILES = {"inputs", ".inputs.partial", "data", "runs", PAGE}
Rows = list[dict[str, Any]]


class VisionRunner(Runner):
    """Runner of msrl commands on rows with images."""

    def preprocess(self, source: str, handler: str, columns: Mapping[str, str]) -> None:
        """Preprocess `inputs/{source}.jsonl` into `data/{source}`."""
        files = ("--input", f"inputs/{source}.jsonl", "--output-prefix", f"data/{source}")
        texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", handler)
        self.msrl("preprocess", "preprocess", *files, *texts, "--map-keys", json.dumps(columns))

    def train(self, command: str, name: str) -> None:
        """Run a training with the settings of this folder."""
        settings = ("-c", str(HERE / f"{name}.yaml"), "--set", f"run.seed={self.seed}")
        self.msrl(command, command, *settings)

    def answers(self, stage: str) -> Rows:
        """Return the held-out questions with the model's answers, sampled greedily."""
        output = f"answers_{stage.replace(' ', '_')}.jsonl"
        files = ("--model", MODELS[stage], "--input", "inputs/heldout.jsonl", "--output", output)
        self.msrl("generate", "generate", *files, "--max-tokens", "24")
        return read_rows(self.folder / output)


def main() -> None:
    """Run all stages and print the results."""
    parser = argparse.ArgumentParser(
        description="Train a small random vision-language model to count shapes, on a laptop."
    )
    out = "Folder to create; a previous run of this script is replaced (default: %(default)s)."
    parser.add_argument("--out", type=Path, default=Path("runs/vision"), help=out)
    seed = "Random seed of the images, the model and both trainings (default: %(default)s)."
    parser.add_argument("--seed", type=int, default=0, help=seed)
    arguments = parser.parse_args()
    runner, started = VisionRunner(arguments.out, arguments.seed), time.perf_counter()
    remove_previous_run(arguments.out, KNOWN_FILES)
    make_inputs(arguments.out / "inputs", arguments.seed)
    answers = {"before": runner.answers("before")}
    runner.preprocess("sft", "alpaca", {})
    runner.train("train-sft", "sft")
    answers["after SFT"] = runner.answers("after SFT")
    runner.preprocess("rl", "r1", {"prompt": "prompt", "response": "answer"})
    runner.train("train-grpo", "grpo")
    answers["after GRPO"] = runner.answers("after GRPO")
    report(runner, answers, time.perf_counter() - started)


def report(runner: VisionRunner, answers: Mapping[str, Rows], seconds: float) -> None:
    """Write the page with images and print accuracies and durations."""
    write_page(runner.folder, answers)
    print("\n| model | held-out accuracy | images with two colors |\n|---|---|---|")
    for stage, rows in answers.items():
        hard = [row for row in rows if "," in row["answer"]]
        print(f"| {stage} | {accuracy(rows):.1%} | {accuracy(hard):.1%} |")
    print("\nThe accuracies after training differ by a few points between machines.")
    print(", ".join(f"{stage} {duration:.0f} s" for stage, duration in runner.seconds.items()))
    print(f"Total: {seconds:.0f} s with seed {runner.seed}. Output folder: {runner.folder}")
    print(f"Images with the answers of all models: {runner.folder / PAGE}")
    print("To ask the final model about an image, run msrl chat and type /image FILE:")
    print(f"  msrl chat --model {runner.folder / MODELS['after GRPO']}")


def response(row: Mapping[str, Any]) -> str:
    """Return the answer of a model."""
    return str(row["completions"][0]["text"]).strip()


def is_right(row: Mapping[str, Any]) -> bool:
    return bool(score(response(row), row["answer"]))


def accuracy(rows: Rows) -> float:
    return sum(map(is_right, rows)) / len(rows)


def write_page(folder: Path, answers: Mapping[str, Rows]) -> None:
    """Write a page with images, their answers and those of the models after each stage."""
    figures: list[str] = []
    for rows in list(zip(*answers.values(), strict=True))[:NUM_SHOWN]:
        data = (folder / "inputs" / rows[0]["images"][0]).read_bytes()
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        lines = [f"<b>{html.escape(rows[0]['answer'])}</b>"]
        for stage, row in zip(answers, rows, strict=True):
            mark = "right" if is_right(row) else "wrong"
            text = html.escape(response(row)[:60])
            lines.append(f'<span class="{mark}">{stage}: {text} ({mark})</span>')
        image = f'<img src="{source}" alt="{html.escape(rows[0]["answer"])}">'
        figures.append(f"<figure>{image}<figcaption>{'<br>'.join(lines)}</figcaption></figure>")
    style = (
        "body{font:15px sans-serif;margin:2em}main{display:grid;gap:1em;"
        "grid-template-columns:repeat(auto-fill,minmax(220px,1fr))}figure{margin:0}"
        ".right{color:#17692f}.wrong{color:#a01c1c}"
    )
    head = f'<meta charset="utf-8"><title>Counting shapes</title><style>{style}</style>'
    title = "<h1>Counting shapes: held-out images and answers</h1>"
    page = f'<!doctype html><html lang="en">{head}{title}<main>{"".join(figures)}</main></html>\n'
    (folder / PAGE).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
