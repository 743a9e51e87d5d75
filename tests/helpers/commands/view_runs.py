"""Small run folders for tests of `msrl view`, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models

from msrl.tracking.log_file import SAVED
from msrl.tracking.rollouts import RolloutRecord, write_records
from msrl.workflows.view.pieces import byte_alphabet

# Texts that would act in a page, a script, a stylesheet, a terminal or a Markdown viewer.
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg/onload=window.hacked=1><a href=javascript:window.hacked=1>click</a>",
    "<style>*{display:none}</style><meta http-equiv=refresh content=0;url=http://example.invalid>",
    "']}); window.hacked = 1; //\u2028window.hacked = 1;\u2029",
    "</textarea><!--<script>",
    "\x1b[31mred\x1b]0;title\x07\x00\u202egnp.exe\u202c\u200b",
    "${window.hacked=1} {{constructor.constructor('window.hacked=1')()}}",
    "[link](javascript:window.hacked=1) &lt;b&gt; &#x3C;script&#x3E;",
)
HEAD = "<think> 8+7=15 </think><answer> "


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: the id of a token is its byte."""
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=dict(alphabet), merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration with two reward sources."""
    sources = [{"verifier": "base_acc", "weight": 0.9}, {"verifier": "format", "weight": 0.1}]
    config: dict[str, Any] = {
        "run": {"name": name, "dir": "runs"},
        "model": {"path": "model"},
        "data": {"train": "data/rl"},
        "rollout": {"samples_per_prompt": 4, "prompts_per_step": 3},
        "reward": {"sources": sources},
        "train": {"optimizer": {"lr": 1e-4}},
    }
    return config | changes


def response(step: int, group: int, sample: int) -> str:
    """Return a response whose answer is right (15) in half of the samples."""
    answer = 15 if (step + group + sample) % 2 else 14
    return f"{HEAD}\\boxed{{{answer}}} </answer>"


def jsonl_row(text: str, prompt_index: int, **changes: Any) -> dict[str, Any]:
    """Return a line of a JSONL rollout file."""
    prompt = f"What is 8+7? ({prompt_index})"
    ids = list(text.encode("utf-8", "surrogatepass"))
    is_right = "boxed{15}" in text
    row = {
        "prompt_index": prompt_index,
        "prompt": prompt,
        "prompt_ids": list(prompt.encode()),
        "response": text,
        "response_ids": ids,
        "logprobs": [round(-0.01 * (i % 7), 4) for i in range(len(ids))],
        "answer": "15",
        "reward": 1.0 if is_right else 0.1,
        "scores": {"base_acc": float(is_right), "format": 1.0},
        "reasons": {
            "base_acc": f"{15 if is_right else 14} in the box, 15 expected",
            "format": "in order",
        },
        "num_response_tokens": len(ids),
        "finish_reason": "stop",
        "policy_version": 0,
        "advantage": 0.5 if is_right else -0.5,
        "is_trained": True,
    }
    return row | changes


def edited_episode(**changes: Any) -> dict[str, Any]:
    """Return a row of an episode with two sequences, and thus two histories."""
    row = jsonl_row("\\boxed{15}", 0, prompt_ids=[1, 2], response_ids=[3, 4, 7])
    sequences = [
        {"token_ids": [1, 2, 3, 4, 5], "is_sampled": [False, False, True, True, False]},
        {"token_ids": [1, 6, 7], "is_sampled": [False, False, True]},
    ]
    more = {"logprobs": [-1.0, -2.0, -3.0], "versions": [[3, 1], [4, 2]], "sequences": sequences}
    return row | more | changes


def record(step: int, group: int, sample: int, text: str, **changes: Any) -> RolloutRecord:
    """Return a rollout record with the trainer's values of every token."""
    row = jsonl_row(text, 10 * step + group)
    prompt_ids, ids = row["prompt_ids"], row["response_ids"]
    is_sampled = np.arange(len(prompt_ids) + len(ids)) >= len(prompt_ids)
    behavior = np.zeros(len(is_sampled), np.float32)
    behavior[len(prompt_ids) :] = row["logprobs"]
    noise = np.where(is_sampled, np.sin(np.arange(len(is_sampled))), 0).astype(np.float32)
    values: dict[str, Any] = {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_index": row["prompt_index"],
        "token_ids": np.asarray([*prompt_ids, *ids], np.int64),
        "loss_mask": is_sampled,
        "is_sampled": is_sampled,
        "behavior_logprobs": behavior,
        "versions": ((step - 1, len(ids)),),
        "trainer_version": step - 1,
        "advantages": np.where(is_sampled, np.float32(row["advantage"]), np.float32(0)),
        "reward": row["reward"],
        "scores": row["scores"],
        "reasons": row["reasons"],
        "is_right": row["reward"] == 1,
        "finish_reason": "stop",
        "messages": (("prompt", row["prompt"]), ("assistant", text)),
        "answer": "15",
        "times": {"rollout": 100.0 + step, "update": 101.0 + step},
        "trainer_logprobs": behavior + 0.1 * noise,
        "reference_logprobs": behavior - 0.05 * noise,
        "entropies": np.abs(noise),
        "tag": "math",
    }
    return RolloutRecord(**(values | changes))


def make_run(
    folder: Path,
    *,
    num_steps: int = 3,
    texts: Sequence[str] = (),
    format: str = "jsonl",
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a run folder. `texts` are further responses of the first step."""
    folder.mkdir(parents=True)
    config = make_config(folder.name) if config is None else config
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    saved = SAVED.format(step=2, folder=folder)
    (folder / "log.txt").write_text(f"2026-01-01T00:00:00Z {saved}\n")
    write_tokenizer(folder / "checkpoints" / "hf")
    _write_attempts(folder, num_steps)
    _write_metrics(folder, num_steps)
    (folder / "rollouts").mkdir()
    for step in range(1, num_steps + 1):
        further = texts if step == 1 else ()
        _write_rollouts(folder / "rollouts" / f"step_{step:06d}", step, further, format)
    _write_evaluations(folder, num_steps)
    return folder


def _write_attempts(folder: Path, num_steps: int) -> None:
    attempt = {
        "attempt": 1,
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["msrl"],
        "versions": {"msrl": "0.1.0"},
        "num_steps": num_steps,
    }
    ended = {"outcome": "completed", "last_step": num_steps}
    second = {**attempt, "attempt": 2, "started": "2026-01-01T00:02:30+00:00", **ended}
    lines = [attempt | {"outcome": "interrupted", "last_step": 2}, second]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_metrics(folder: Path, num_steps: int) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            values: dict[str, Any] = {"reward/mean": 0.5 + 0.1 * step, "train/loss": -0.01 * step}
            values["perf/tokens_per_s"] = 100.0
            if step in (0, num_steps):
                values |= {"eval/pass@1": 0.5, "eval/pass@4": 0.75}
            if step == 1:
                values["train/kl"] = "NaN"
            seconds = {"rollout": 1.0, "reward": 0.1, "update": 2.0, "step": 3.1}
            time = f"2026-01-01T00:0{min(step, 9)}:00+00:00"
            row = {"step": step, "time": time, "metrics": values, "seconds": seconds}
            file.write(json.dumps(row) + "\n")


def _write_rollouts(path: Path, step: int, texts: Sequence[str], format: str) -> None:
    cells = [(g, s, response(step, g, s)) for g in range(3) for s in range(4)]
    cells += [(3 + i // 4, i % 4, text) for i, text in enumerate(texts)]
    if format == "parquet":
        records = [record(step, group, sample, text) for group, sample, text in cells]
        write_records(path.with_suffix(".parquet"), records)
        return
    rows = [jsonl_row(text, 10 * step + group) for group, _, text in cells]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.with_suffix(".jsonl").write_text(lines)


def _write_evaluations(folder: Path, num_steps: int) -> None:
    (folder / "eval").mkdir()
    for step in (0, num_steps):
        rows: list[dict[str, Any]] = []
        for group in range(6):
            is_right = (group < 4) if step else (group > 1)
            text = f"{HEAD}\\boxed{{{15 if is_right else 13}}} </answer>"
            rows.append(jsonl_row(text, group, is_right=is_right))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text(lines)
