"""Benchmarks: for each kind of work, how msrl and the peers do it, and the goal of the ratio."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from benchmarks.checkpoints import make_large, make_small
from benchmarks.measure import Finished, quiet_environment, timed

ROOT = Path(__file__).resolve().parents[1]
SETTLE_STEPS = 4
# Folders of the inputs. The peer's script requires the name qwen3_06b.
MEDIUM, SMALL, LARGE = "qwen3_06b", "small/qwen3_06b", "large_8gb"


@dataclass(frozen=True)
class Bench:
    """Paths of the peers' scripts and Python, of the inputs and of msrl's outputs."""

    scripts: Path
    peers_python: Path
    inputs: Path

    @property
    def work(self) -> Path:
        return self.inputs / "ours"

    def msrl(self, *args: str | Path) -> Finished:
        """Run the `msrl` command of this Python environment."""
        return timed(
            [Path(sys.executable).with_name("msrl"), *args],
            environment=quiet_environment(),
            cwd=ROOT,
        )

    def peer(self, script: str, *args: str) -> tuple[Finished, Mapping[str, float]]:
        """Run a peer's script; also return the numbers of its last output line, which is JSON."""
        command = [self.peers_python, self.scripts / script, self.inputs, *args]
        done = timed(command, environment=quiet_environment(), cwd=self.inputs)
        return done, json.loads(done.stdout.strip().splitlines()[-1])


@dataclass(frozen=True)
class Sample:
    """One measurement: the compared figure, and additional ones."""

    value: float
    more: Mapping[str, float] = field(default_factory=dict)


Measurement = Callable[[Bench], Sample]


@dataclass(frozen=True)
class Case:
    """A benchmark. `goals` limit the ratio ours / peer from above, or from below for rates.

    A benchmark that does not use the inputs needs no peers' scripts.
    """

    name: str
    work: str
    unit: str
    ours: Measurement
    peers: Mapping[str, Measurement]
    goals: Mapping[str, float]
    prepare: Callable[[Bench], None]
    higher_is_better: bool = False
    uses_inputs: bool = True


def convert(source: str) -> Measurement:
    """Convert a checkpoint of the inputs at TP 2, without verification."""

    def run(bench: Bench) -> Sample:
        target = bench.work / "convert"
        shutil.rmtree(target, ignore_errors=True)
        done = bench.msrl(
            "convert-ckpt",
            "hf2mcore",
            "--load",
            bench.inputs / source,
            "--save",
            target,
            "--tp",
            "2",
            "--no-verify",
        )
        shutil.rmtree(target)
        return process_sample(done)

    return run


def plain_copy(bench: Bench) -> Sample:
    """Copy the same files with `cp`, as a measure of the disk."""
    target = bench.work / "copied"
    done = timed(
        ["cp", "-r", bench.inputs / LARGE, target],
        environment=quiet_environment(),
        cwd=bench.inputs,
    )
    shutil.rmtree(target)
    return process_sample(done)


def copy_floor(folder: str = ".") -> Measurement:
    """Read and write every tensor of the checkpoint `qwen3_06b` in a folder of the inputs."""
    return lambda bench: process_sample(
        replace(bench, inputs=bench.inputs / folder).peer("copy_floor.py")[0]
    )


def process_sample(done: Finished) -> Sample:
    return Sample(
        done.seconds,
        {"CPU s": done.cpu_seconds, "peak anonymous MB": done.peak_anonymous_bytes / 1e6},
    )


def warm_cache(
    source: str, make: Callable[[Path], None] = lambda folder: None
) -> Callable[[Bench], None]:
    """Create a checkpoint if it is missing and read it, so that it is in the page cache."""

    def prepare(bench: Bench) -> None:
        make(bench.inputs / source)
        for path in sorted((bench.inputs / source).glob("*.safetensors")):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass

    return prepare


def preprocess_ours(num_workers: int) -> Measurement:
    def run(bench: Bench) -> Sample:
        corpus = bench.inputs / "corpus.jsonl"
        with corpus.open("rb") as file:
            num_docs = sum(1 for _ in file)
        command = preprocess(bench, corpus, "corpus", "pretrain")
        done = bench.msrl(*command, "--workers", str(num_workers))
        more = {"peak anonymous MB": done.peak_anonymous_bytes / 1e6}
        return Sample(num_docs / done.seconds, more)

    return run


def tokenize_ceiling(bench: Bench) -> Sample:
    """Measure the tokenizer alone, on all cores, as one worker also uses them."""
    return Sample(bench.peer("tokenize_ceiling.py")[1]["docs_per_s"])


def preprocess(bench: Bench, source: Path, name: str, handler: str) -> list[str | Path]:
    """Return the arguments to preprocess a file into the work folder."""
    flags = [
        "--tokenizer",
        bench.inputs / "tiny",
        "--handler",
        handler,
        "--output-prefix",
        bench.work / name,
        "--overwrite",
    ]
    return ["preprocess", "--input", source, *flags]


def prepare_sft(bench: Bench) -> None:
    rows = preprocess(bench, bench.inputs / "sft.jsonl", "sft", "sharegpt")
    bench.msrl(*rows, "--template", "native", "--seq-length", "512", "--pack")


def prepare_grpo(bench: Bench) -> None:
    rows = preprocess(bench, bench.inputs / "grpo.jsonl", "grpo", "r1")
    bench.msrl(
        *rows,
        "--template",
        "native",
        "--map-keys",
        json.dumps({"prompt": "prompt", "response": "answer"}),
    )


def prepare_pairs(bench: Bench) -> None:
    """Pair each answer of the chat rows with the answer to the next question."""
    lines = (bench.inputs / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = [json.loads(line)["messages"] for line in lines]
    with (bench.inputs / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for (question, answer), (_, other) in pairwise(dialogues):
            row = {"prompt": [question], "chosen": [answer], "rejected": [other]}
            file.write(json.dumps(row) + "\n")
    rows = preprocess(bench, bench.inputs / "pairs.jsonl", "pairs", "pairs")
    bench.msrl(*rows, "--template", "native", "--seq-length", "512")


def train(
    bench: Bench,
    command: str,
    name: str,
    *sets: str,
    data: str | None = None,
    settle: int = SETTLE_STEPS,
) -> Sample:
    """Train with the benchmark's configuration; return the median seconds of the later steps.

    They are the steps after the first `settle` ones.
    """
    from msrl.tracking.metrics import read_metrics

    runs = bench.work / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    settings = (
        f"run.dir={runs}",
        f"model.path={bench.inputs / 'tiny'}",
        f"data.train={bench.work / (data or name)}",
        *sets,
    )
    start = time.time()
    done = bench.msrl(
        command,
        "-c",
        ROOT / "benchmarks" / f"{name}.yaml",
        *(argument for setting in settings for argument in ("--set", setting)),
    )
    later = read_metrics(runs / name)[settle:]
    medians: dict[str, float] = {}
    for stage in dict.fromkeys(stage for report in later for stage in report.seconds):
        values = [report.seconds[stage] for report in later if stage in report.seconds]
        medians[stage] = statistics.median(values)
    return Sample(
        medians.pop("step"),
        {f"{stage} s": value for stage, value in medians.items()}
        | {"first step after s": first_step_at(runs / name) - start, "whole run s": done.seconds},
    )


def first_step_at(run: Path) -> float:
    """Return the time at which a run logged its first step, in seconds since 1970."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        return datetime.fromisoformat(json.loads(file.readline())["time"]).timestamp()


def sft_ours(dtype: str) -> Measurement:
    return lambda bench: train(bench, "train-sft", "sft", f"model.dtype={dtype}")


def prepare_lengths(bench: Bench) -> None:
    rows = preprocess(bench, bench.inputs / "sft.jsonl", "lengths", "sharegpt")
    bench.msrl(*rows, "--template", "native", "--seq-length", "512")


def lengths_ours(bench: Bench) -> Sample:
    """Return the tokens of examples per second, without padding.

    The examples of GSM8K are packed while training; the assistant's turns are trained.
    """
    from msrl.tracking.metrics import read_metrics

    sample = train(
        bench, "train-sft", "sft", "model.dtype=float32", "data.pack=true", data="lengths"
    )
    later = read_metrics(bench.work / "runs" / "sft")[SETTLE_STEPS:]
    tokens = sum(report.metrics["perf/tokens_per_s"] * report.seconds["step"] for report in later)
    return Sample(
        tokens / sum(report.seconds["step"] for report in later),
        {"step s": sample.value, **sample.more},
    )


def lengths_trl(bench: Bench) -> Sample:
    figures = bench.peer(str(ROOT / "benchmarks" / "peers" / "trl_lengths.py"))[1]
    return Sample(figures["tokens_per_s"], {"step s": figures["step_s"]})


def train_in_layout(parallel: str, *, num_ranks: int | None = None) -> Measurement:
    """Train on the packed batch in a layout, with two micro-batches on one data-parallel rank.

    Two ranks have one core each.
    """
    devices = () if num_ranks is None else (f"cluster.devices_per_node={num_ranks}",)
    sets = ("model.dtype=float32", "train.micro_batch=2", f"train.parallel.{parallel}", *devices)
    return lambda bench: train(bench, "train-sft", "sft", *sets)


def grpo_ours(*, is_compiled: bool) -> Measurement:
    """Train with engines that compile the model, or with engines as they are on CPU by default."""
    eager = f"rollout.engine.eager={str(not is_compiled).lower()}"
    return lambda bench: train(bench, "train-grpo", "grpo", eager)


def preference_ours(command: str, name: str) -> Measurement:
    return lambda bench: train(bench, command, name, data="pairs")


def preference_trl(objective: str) -> Measurement:
    return peer_step(str(ROOT / "benchmarks" / "peers" / "trl_preference.py"), objective)


def peer_step(script: str, *args: str) -> Measurement:
    return lambda bench: Sample(bench.peer(script, *args)[1]["step_s"])


def experts_step(mode: str) -> Measurement:
    """Run a mode of `benchmarks.experts` with the environment of a training rank."""

    def run(bench: Bench) -> Sample:
        from msrl.platforms import get

        environment = {**quiet_environment(), **get("cpu").worker_environment(1)}
        command = [sys.executable, "-m", "benchmarks.experts", mode]
        done = timed(command, environment=environment, cwd=ROOT)
        return Sample(json.loads(done.stdout.strip().splitlines()[-1])["s"])

    return run


def weight_figures(bench: Bench, mode: str) -> dict[str, float]:
    """Run a mode of `benchmarks.weights`."""
    command = [sys.executable, "-m", "benchmarks.weights", mode]
    done = timed(command, environment=quiet_environment(), cwd=ROOT)
    return json.loads(done.stdout.strip().splitlines()[-1])


def weights_ours(bench: Bench) -> Sample:
    figures = weight_figures(bench, "transfer")
    return Sample(figures.pop("GB/s"), {**figures, **weight_figures(bench, "engine")})


def weights_memcpy(bench: Bench) -> Sample:
    return Sample(weight_figures(bench, "memcpy")["GB/s"])


CASES = (
    Case(
        "convert",
        "Qwen3 0.6B to Megatron, TP 2",
        "s",
        convert(MEDIUM),
        {"copy_floor": copy_floor()},
        {"copy_floor": 1.25},
        warm_cache(MEDIUM),
    ),
    Case(
        "convert-small",
        "Qwen2.5 0.5B to Megatron, TP 2",
        "s",
        convert(SMALL),
        {"copy_floor": copy_floor("small")},
        {"copy_floor": 1.25},
        warm_cache(SMALL, make_small),
    ),
    Case(
        "large-convert",
        "8 GB in 8 files to Megatron, TP 2",
        "s",
        convert(LARGE),
        {"cp": plain_copy},
        {"cp": 1 / 0.6},
        warm_cache(LARGE, make_large),
    ),
    *(
        Case(
            name,
            f"JSONL to tokens on disk, {workers}",
            "docs/s",
            preprocess_ours(count),
            {"tokenize_ceiling": tokenize_ceiling},
            {"tokenize_ceiling": 0.9},
            lambda bench: None,
            higher_is_better=True,
        )
        for name, count, workers in (
            ("preprocess", 2, "2 workers"),
            ("preprocess-one", 1, "1 worker"),
        )
    ),
    Case(
        "sft-fp32",
        "SFT step, packed 4 x 512, fp32",
        "s/step",
        sft_ours("float32"),
        {"raw_hf": peer_step("raw_hf.py"), "trl_sft": peer_step("trl_sft.py")},
        {"raw_hf": 0.75},
        prepare_sft,
    ),
    Case(
        "sft-bf16",
        "SFT step, packed 4 x 512, bf16",
        "s/step",
        sft_ours("bfloat16"),
        {"raw_hf": peer_step("raw_hf.py", "--bf16"), "trl_sft": peer_step("trl_sft.py", "--bf16")},
        {"raw_hf": 0.75},
        prepare_sft,
    ),
    Case(
        "sft-lengths",
        "SFT on GSM8K's own lengths, packed 4 x 512, fp32",
        "tokens/s",
        lengths_ours,
        {"trl": lengths_trl},
        {"trl": 2.0},
        prepare_lengths,
        higher_is_better=True,
    ),
    Case(
        "scaling",
        "SFT step on one rank (ours) and the same batch on two, fp32",
        "s/step",
        train_in_layout("tp=1"),
        {layout: train_in_layout(f"{layout[:2]}={layout[2:]}") for layout in ("tp2", "pp2", "cp2")}
        | {"dp2": train_in_layout("tp=1", num_ranks=2)},
        {},
        prepare_sft,
    ),
    Case(
        "grpo",
        "GRPO step, 4 prompts x 8 samples x 64 tokens, compiled rollouts",
        "s/step",
        grpo_ours(is_compiled=True),
        {"trl_grpo": peer_step("trl_grpo.py"), "eager": grpo_ours(is_compiled=False)},
        {"trl_grpo": 0.55},
        prepare_grpo,
    ),
    Case(
        "dpo",
        "DPO step, 8 pairs of GSM8K answers, fp32",
        "s/step",
        preference_ours("train-dpo", "dpo"),
        {"trl_dpo": preference_trl("dpo")},
        {"trl_dpo": 0.6},
        prepare_pairs,
    ),
    Case(
        "rm",
        "step of a reward model, 8 pairs of GSM8K answers, fp32",
        "s/step",
        preference_ours("train-rm", "rm"),
        {"trl_reward": preference_trl("reward")},
        {"trl_reward": 0.7},
        prepare_pairs,
    ),
    Case(
        "experts",
        "32 experts of a layer, 1,024 routed tokens, forward and backward, fp32",
        "s",
        experts_step("grouped"),
        {"sequential": experts_step("sequential")},
        {"sequential": 0.6},
        lambda bench: None,
        uses_inputs=False,
    ),
    Case(
        "weights",
        "weights of Qwen2.5 0.5B in bf16 through shared memory to an engine",
        "GB/s",
        weights_ours,
        {"memcpy": weights_memcpy},
        {"memcpy": 0.4},
        lambda bench: None,
        higher_is_better=True,
        uses_inputs=False,
    ),
)
