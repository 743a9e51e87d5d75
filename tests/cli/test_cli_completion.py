"""Shell completion with the scripts that msrl prints.

bash runs its script. For zsh and fish, the tests send the requests of their scripts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msrl import registry
from msrl.cli.completion import rejoined
from msrl.config.presets import preset_names
from msrl.config.templates import template_names

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not installed")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return an environment with a new home and `msrl` on the path, in a folder with some files."""
    program = tmp_path / "bin" / "msrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m msrl "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    work = tmp_path / "work"
    (work / "configs").mkdir(parents=True)
    for name in ("mine.yaml", "notes.txt", "configs/local.yaml"):
        (work / name).write_text("", encoding="utf-8")
    monkeypatch.chdir(work)
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }


def in_bash(script: str, environment: dict[str, str]) -> str:
    """Return the output of a script that bash runs in a separate process."""
    done = subprocess.run(
        [str(BASH), "-c", f"{script}\ntrue"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "Traceback" not in done.stderr
    return done.stdout


CASES: dict[str, tuple[list[str], set[str]]] = {
    "a command": (["train-g"], {"train-grpo"}),
    "a subcommand": (["convert-ckpt", "hf"], {"hf2mcore", "hf2hf", "hf2gguf"}),
    "an option": (["train-sft", "--lr"], {"--lr"}),
    "a key, with its default": (
        ["train-sft", "--set", "train.optimizer.lr"],
        {"train.optimizer.lr=", "train.optimizer.lr=1e-05"},
    ),
    "a key in one word with its option": (
        ["train-sft", "--set", "=", "run.na"],
        {"run.name=", "run.name=run"},
    ),
    "a preset": (["train-grpo", "--set", "algo.preset", "="], {*preset_names()}),
    "the beginning of a preset": (["train-grpo", "--set", "algo.preset", "=", "dap"], {"dapo"}),
    "a boolean": (["train-sft", "--set", "data.pack", "=", ""], {"true", "false"}),
    "an estimator": (["train-grpo", "--set", "algo.advantage.estimator", "=", "rlo"], {"rloo"}),
    "a verifier": (
        ["train-grpo", "--set", "reward.sources.0.verifier", "=", ""],
        {*registry.names("msrl.rewards.verifiers")},
    ),
    "a template": (
        ["preprocess", "--template", "qwen_"],
        {name for name in template_names() if name.startswith("qwen_")},
    ),
    "a template of a key": (
        ["train-sft", "--set", "model.template", "=", "lla"],
        {"llama2", "llama3"},
    ),
    "a handler": (["preprocess", "--handler", "alp"], {"alpaca", "alpaca_pairs"}),
    "a platform": (["chat", "--platform", ""], {"auto", *registry.names(registry.PLATFORMS)}),
    "a tool parser": (["serve", "model", "--tools", "h"], {"hermes"}),
    "a file or a packaged configuration": (
        ["train-grpo", "-c", ""],
        {"grpo", "sft", "mine.yaml", "configs/"},
    ),
    "a file in a folder": (["train-grpo", "-c", "configs/"], {"configs/local.yaml"}),
    "a configuration by name": (["train-grpo", "--config-name", ""], {"local", "grpo", "sft"}),
    "a command of --for": (
        ["config", "validate", "--for", "train-"],
        {"train-sft", "train-dpo", "train-rm", "train-grpo", "train-distill"},
    ),
    "a folder, which is left to bash": (["chat", "--model", "x"], set()),
}


QUICK = ("a command", "a key in one word with its option", "a file or a packaged configuration")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, id="some"), pytest.param(tuple(CASES), id="all", marks=pytest.mark.full)],
)
@needs_bash
def test_bash_completes_through_the_script_that_msrl_prints(
    names: tuple[str, ...], environment: dict[str, str]
):
    cases = {name: CASES[name] for name in names}
    requests = "\n".join(
        f"COMP_WORDS=(msrl {' '.join(repr(word) for word in words)}); COMP_CWORD={len(words)}; "
        "COMPREPLY=(); _msrl_completion msrl\n"
        'printf "%s\\n" "${COMPREPLY[@]}"; echo --end'
        for words, _ in cases.values()
    )
    answers = in_bash(f'eval "$(msrl --show-completion)"\n{requests}', environment).split(
        "--end\n"
    )[:-1]
    assert {name: {*answer.split()} for name, answer in zip(cases, answers, strict=True)} == {
        name: values for name, (_, values) in cases.items()
    }


@needs_bash
def test_install_completion_writes_the_script_of_the_shell(environment: dict[str, str]):
    assert "bash completion installed" in in_bash("msrl --install-completion", environment)
    script = Path(environment["HOME"]) / ".bash_completions" / "msrl.sh"
    assert "_MSRL_COMPLETE=complete_bash" in script.read_text(encoding="utf-8")
    assert str(script) in (Path(environment["HOME"]) / ".bashrc").read_text(encoding="utf-8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [
        ("zsh", "msrl train-grpo --set algo.preset=dap", "algo.preset=dapo"),
        ("zsh", "msrl train-grpo --set=algo.preset=dap", "algo.preset=dapo"),
        ("fish", "msrl train-grpo --set train.optimizer.lr", "train.optimizer.lr=1e-05"),
        (
            "fish",
            "msrl train-grpo --set ",
            "reward.sources.0.verifier=",
        ),  # explanations of all keys are printed
    ],
)
def test_other_shells_complete_full_words(
    shell: str, line: str, expected: str, environment: dict[str, str]
):
    request = {
        "_MSRL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        ["msrl"], capture_output=True, text=True, check=False, env={**environment, **request}
    )
    assert expected in done.stdout and not done.stderr


@pytest.mark.slow
def test_every_candidate_of_zsh_is_on_one_line(environment: dict[str, str]):
    request = {
        "_MSRL_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": "msrl train-grpo --set algo.",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        ["msrl"], capture_output=True, text=True, check=False, env={**environment, **request}
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) > 20 and lines[0].startswith("_arguments")
    assert all(line.startswith('"') for line in lines[1:])


def test_completion_imports_nothing_heavy(environment: dict[str, str]):
    program = (
        "import atexit, json, sys\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray'}\n"
        "atexit.register(lambda: print(json.dumps(sorted(heavy & set(sys.modules)))))\n"
        "from msrl.cli.app import main\n"
        "main()\n"
    )
    words = "msrl\ntrain-grpo\n--set\nreward.sources.0.verifier\n=\nmath"
    request = {"_MSRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "5"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **request},
    )
    *answers, modules = done.stdout.splitlines()
    assert answers == ["math_17k_acc", "math_verify_reward"] and json.loads(modules) == []


@pytest.mark.parametrize(
    ("words", "current", "expected"),
    [
        (["msrl", "a"], 1, (["msrl", "a"], 1, "")),
        (["msrl", "--set", "a", "=", "b", "--x"], 5, (["msrl", "--set", "a=b", "--x"], 3, "")),
        (["msrl", "--set", "a", "="], 3, (["msrl", "--set", "a="], 2, "a=")),
        (["msrl", "--set", "=", "a", "=", "b"], 5, (["msrl", "--set", "a=b"], 2, "a=")),
        (["msrl", "--set", "="], 2, (["msrl", "--set", ""], 2, "")),
        (["msrl", "h", ":", "1"], 3, (["msrl", "h:1"], 1, "h:")),
        (["msrl", "a", ""], 2, (["msrl", "a", ""], 2, "")),
    ],
)
def test_words_that_bash_split_are_joined(
    words: list[str], current: int, expected: tuple[list[str], int, str]
):
    assert rejoined(words, current) == expected
