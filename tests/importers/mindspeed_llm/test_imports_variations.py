"""Variations of one script, as users write them, mean the same."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrl.config.sources import plain
from msrl.importers.command import translate_arguments

HEAD = "torchrun --nproc_per_node 8 --nnodes 2 posttrain_gpt.py"
FLAGS = {
    "stage": "sft", "finetune": "", "is-instruction-dataset": "", "load": "a folder/ckpt",
    "data-path": "data/alpaca", "tokenizer-name-or-path": "model", "seq-length": "4096",
    "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2",
    "micro-batch-size": "1", "global-batch-size": "32", "lr": "1.25e-6", "min-lr": "1.25e-7",
    "lr-decay-style": "cosine", "train-iters": "20", "bf16": "", "prompt-type": "qwen",
    "lora-r": "16", "lora-target-modules": "linear_qkv linear_proj", "split": "100,0,0",
}  # fmt: skip
LISTS = ("lora-target-modules",)


def quote(name: str) -> str:
    """Return the value of a flag as it is written in a script."""
    return FLAGS[name] if name in LISTS or not FLAGS[name] else shlex.quote(FLAGS[name])


def flags() -> list[str]:
    return [f"--{name} {quote(name)}".strip() for name in FLAGS]


def quoted_flags(template: str) -> list[str]:
    """Return the flags with values that a template quotes, such as `"${{V_{number}}}"`."""
    return [
        f"--{name} {quote(name)}".strip()
        if name in LISTS or not value
        else f"--{name} {template.format(number=number, value=value)}"
        for number, (name, value) in enumerate(FLAGS.items())
    ]


def values(template: str) -> str:
    return "".join(
        template.format(number=number, value=shlex.quote(value))
        for number, value in enumerate(FLAGS.values())
    )


VARIATIONS: dict[str, Callable[[], str]] = {
    "moved": lambda: f"{HEAD} {' '.join(reversed(flags()))}",
    "equals": lambda: HEAD + " " + " ".join(
        f"--{name} {quote(name)}" if name in LISTS or not value else f"--{name}={quote(name)}"
        for name, value in FLAGS.items()
    ),
    "lines": lambda: f"{HEAD} \\\n  " + " \\\n  ".join(flags()),
    "tabs": lambda: f"{HEAD} \\\n\t" + "\t\\\n\t".join(flags()),
    "comments": lambda: f"{HEAD} \\\n  " + " \\\n  # note (x) 'y \\\n  ".join(flags()),
    "array": lambda: "ARGS=(\n" + "  # note (x)\n".join(f"  {flag} # y\n" for flag in flags())
    + f')\n{HEAD} "${{ARGS[@]}}" 2>&1 | tee "log_$(date +%F).txt"',
    "appended": lambda: "ARGS=()\n" + "".join(f"ARGS+=({flag})\n" for flag in flags())
    + f'[ -n "${{DEBUG_X:-}}" ] && ARGS+=(--lr 1)\n{HEAD} "${{ARGS[@]}}"',
    "defaults": lambda: f"{HEAD} " + " ".join(quoted_flags('"${{V_X{number}:-{value}}}"')),
    "variables": lambda: values("export V{number}={value}\n")
    + f"{HEAD} " + " ".join(quoted_flags('"$V{number}"')),
    "function": lambda: f'run() {{\n  local name=$1; shift\n  {HEAD} "$@"\n}}\n'
    + f"run x {' '.join(flags())}",
    "eval": lambda: f"CMD={shlex.quote(' '.join([HEAD, *flags()]))}\neval \"$CMD\"",
    "shell": lambda: f"bash -c {shlex.quote(' '.join([HEAD, *flags()]))}",
    "branch": lambda: f"if [[ -z $NODES_X ]]; then\n  {HEAD} {' '.join(flags())} &\nfi\nwait",
    "Windows": lambda: f"{HEAD} \\\r\n  " + " \\\r\n  ".join(flags()) + "\r\n",
    "environment": lambda: f"env {HEAD} {' '.join(flags())}",
}  # fmt: skip


def native_tree(text: str, file: Path) -> Any:
    file.write_bytes(text.encode())
    return plain(translate_arguments("mindspeed-llm", [str(file)]).complete_tree())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", VARIATIONS)
def test_a_variation_of_a_script_has_the_same_configuration(name: str, tmp_path: Path) -> None:
    expected = native_tree(f"{HEAD} {' '.join(flags())}", tmp_path / "run.sh")
    assert expected["train"]["optimizer"]["lr"] == 1.25e-6
    tree = native_tree(VARIATIONS[name](), tmp_path / "run.sh")
    cluster = tree["cluster"]
    cluster.pop("env", None)  # the variables of "variables" are exported
    assert tree == expected


def test_values_of_an_included_file_have_the_same_configuration(tmp_path: Path) -> None:
    expected = native_tree(f"{HEAD} {' '.join(flags())}", tmp_path / "run.sh")
    (tmp_path / "env.sh").write_text(values("V{number}={value}\n"))
    text = f'. "$(cd "$(dirname "$0")" && pwd)/env.sh"\n{HEAD} ' + " ".join(
        quoted_flags('"${{V{number}}}"')
    )
    assert native_tree(text, tmp_path / "run.sh") == expected
