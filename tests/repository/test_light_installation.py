"""Commands without the packages of a platform, as `pip install msrl` alone installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from config_inputs import QWEN2
from msrl.cli.app import ORDER
from msrl.packages import missing_package
from support import HANG_S, ROOT, assert_mentions

# Runs msrl where the packages of the extras cannot be imported. Each command is a fork of one
# process, which has imported what most commands import.
WITHOUT = """
import json, os, sys
from msrl import packages
class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in packages.PLATFORM_MODULES | packages.EXTRAS.keys():
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Blocked())
import msrl.checks.validate, msrl.plan.run_plan
from msrl.cli import app
for line in sys.stdin:
    words, *outputs = json.loads(line)
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["msrl", *words]
        sys.exit(app.main())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
GRPO = """
model: {path: hf}
rollout: {max_prompt_tokens: 100, max_response_tokens: 100, samples_per_prompt: 4}
reward: {sources: [{verifier: math_17k_acc}, {verifier: strict_format}]}
train: {steps: 3}
"""
DISTILL = """
model: {path: hf}
data: {train: rows.jsonl}
rollout: {max_prompt_tokens: 100, max_response_tokens: 100}
algo: {distill: {teachers: [{model: hf}]}}
train: {steps: 2}
"""
EVAL = """
model: {path: hf}
data: {eval: rows.jsonl}
rollout: {max_prompt_tokens: 100, max_response_tokens: 100}
reward: {sources: [{verifier: acc}]}
evaluate: {models: [hf]}
"""
SCRIPT = """
python convert_ckpt.py --load-model-type hf --save-model-type mg --model-type-hf llama2 \\
    --target-tensor-parallel-size 2 --load-dir hf --save-dir new --use-mcore-models
"""


LIGHT = (
    "--help",
    "--version",
    "train-grpo --help",
    "config show -c grpo.yaml",
    "config validate -c convert.yaml",
    "config import --from mindspeed-llm convert.sh",
    "config schema",
    "view run",
    "view run --single-file",
    "report run",
    "train-sft --model hf --data rows.jsonl --steps 2 --dry-run",
    "train-dpo --model hf --data pairs.jsonl --steps 2 --dry-run",
    "train-rm --model hf --data pairs.jsonl --steps 2 --dry-run",
    "train-grpo -c grpo.yaml --model hf --data rows.jsonl --dry-run",
    "train-distill -c distill.yaml --dry-run",
    "generate --model hf --prompt x --dry-run",
    "chat --model hf --dry-run",
    "eval -c eval.yaml --dry-run",
    "convert-ckpt hf2mcore --load hf --save new --dry-run",
    "serve hf --dry-run",
)
HEAVY = (
    "preprocess --input rows.jsonl --handler gsm8k --tokenizer hf --template qwen "
    "--output-prefix new",
    "preprocess --input rows.jsonl --handler gsm8k --tokenizer hf --template qwen --show 1",
    "train-sft --model hf --data rows.jsonl --steps 2",
    "train-dpo --model hf --data pairs.jsonl --steps 2",
    "train-rm --model hf --data pairs.jsonl --steps 2",
    "train-grpo -c grpo.yaml --model hf --data rows.jsonl",
    "train-distill -c distill.yaml",
    "eval -c eval.yaml",
    "generate --model hf --prompt x",
    "chat --model hf",
    "serve hf",
    "convert-ckpt hf2mcore --load hf --save new",
    "convert-ckpt hf2hf --load hf --save new",
    "convert-ckpt inspect hf",
    "diagnose mismatch run",
    "cluster status",
    "cluster up",
    "cluster join 127.0.0.1:6379",
    "cluster down",
)


Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def light(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Function that runs msrl in `folder` without the optional packages."""
    outputs = [tmp_path_factory.mktemp("outputs") / name for name in ("stdout", "stderr")]
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        requests, codes = process.stdin, process.stdout

        def run(words: str) -> subprocess.CompletedProcess[str]:
            command = words.split()
            print(json.dumps([command, *map(str, outputs)]), file=requests, flush=True)
            code = int(codes.readline())
            return subprocess.CompletedProcess(command, code, *(o.read_text() for o in outputs))

        yield run
        requests.close()


def installed(program: Path, folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run the console script of an installation in `folder`."""
    command = [str(program), *words.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(QWEN2))
    (folder / "grpo.yaml").write_text(GRPO)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(GRPO)
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "metrics": {}, "seconds": {}}\n')
    (folder / "distill.yaml").write_text(DISTILL)
    (folder / "eval.yaml").write_text(EVAL)
    (folder / "pairs.jsonl").write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n')
    (folder / "rows.jsonl").write_text('{"question": "1+1", "answer": "so #### 2"}\n')
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / "hf" / name).write_text("{}")
    (folder / "convert.yaml").write_text("convert: {command: hf2mcore, load: hf, save: new}\n")
    (folder / "convert.sh").write_text(SCRIPT)
    return folder


def assert_works(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr
    if "inputs:" in done.stdout:
        assert_mentions(done.stdout, "not checked", "not installed", "msrl[cpu]")


def assert_names_the_extra(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert_mentions(lines[0], "not installed", "msrl[cpu]", "cuda", "npu")
    assert not [*folder.glob("new*")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", LIGHT)
def test_what_login_nodes_do_needs_no_optional_package(words: str, light: Run) -> None:
    assert_works(light(words))


@pytest.mark.sample(2)
@pytest.mark.parametrize("words", HEAVY)
def test_other_commands_name_the_extra_in_one_line(words: str, folder: Path, light: Run) -> None:
    assert_names_the_extra(light(words), folder)


@pytest.mark.full
def test_the_wheel_alone_runs_or_names_the_extra(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    program = tmp_path / "bare" / "bin"
    install = [str(program / "pip"), "install", "-q", str(ROOT)]
    if subprocess.run(install, capture_output=True, timeout=HANG_S).returncode:
        pytest.skip("pip cannot install the package and its dependencies here")
    for name in ORDER:
        assert_works(installed(program / "msrl", folder, f"{name} --help"))
    for words in LIGHT:
        assert_works(installed(program / "msrl", folder, words))
    for words in HEAVY:
        assert_names_the_extra(installed(program / "msrl", folder, words), folder)


def test_a_missing_module_of_another_package_keeps_its_traceback() -> None:
    assert missing_package(ModuleNotFoundError("x", name="my_rewards")) is None
    assert missing_package(ModuleNotFoundError("x", name="torch.nothing")) is None
    assert "msrl[wandb]" in (missing_package(ModuleNotFoundError("x", name="wandb")) or "")
