"""`--dry-run` and `msrl doctor -c` refuse what the command itself refuses before it starts."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from msrl.config.schema import Config
from msrl.workflows import preprocess
from support import assert_mentions
from test_cli import msrl
from tiny_qwen2 import make_model, save_model
from training_runs import write_rows

Damage = Callable[[Path], object]
ROWS = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(8)]
TRAINING = {
    "model": {"path": "hf", "dtype": "float32"},
    "train": {"steps": 1},
    "cluster": {"platform": "cpu"},
    "log": {"trackers": []},
}
FILES = {
    "train-sft": {
        **TRAINING,
        "data": {"train": "sft"},
        "train": {"steps": 1, "global_batch": 4},
    },
    "train-grpo": {
        **TRAINING,
        "data": {"train": "prompts"},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 100,
            "max_response_tokens": 100,
        },
        "reward": {"sources": [{"verifier": "exact_match"}]},
    },
    "generate": {
        "cluster": {"platform": "cpu"},
        "generate": {"model": "hf", "input": "questions.jsonl", "output": "answers.jsonl"},
    },
    "chat": {"cluster": {"platform": "cpu"}, "chat": {"model": "hf"}},
    "serve": {"cluster": {"platform": "cpu"}, "serve": {"model": "hf", "port": 0}},
    "eval": {
        "cluster": {"platform": "cpu"},
        "model": {"dtype": "float32"},
        "data": {"eval": "prompts"},
        "rollout": {"max_prompt_tokens": 100, "max_response_tokens": 100},
        "reward": {"sources": [{"verifier": "exact_match"}]},
        "evaluate": {"models": ["hf"]},
    },
    "preprocess": {
        "preprocess": {
            "input": ["rows.jsonl"],
            "tokenizer": "hf",
            "handler": "alpaca",
            "template": "qwen",
            "output_prefix": "new",
        }
    },
    "convert-ckpt": {"convert": {"command": "hf2mcore", "load": "hf", "save": "mcore"}},
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command that is refused, the reason on disk, and fragments of the message."""

    command: str
    sets: tuple[str, ...]
    fragments: tuple[str, ...]
    damage: Damage = lambda folder: None


def _used_run(folder: Path) -> None:
    run = folder / "runs" / "run"
    run.mkdir(parents=True)
    (run / "attempts.jsonl").write_text("{}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "metrics": {}, "seconds": {}}\n')


def _weights_gone(folder: Path) -> None:
    (folder / "hf" / "model.safetensors").unlink()


def _weights_truncated(folder: Path) -> None:
    path = folder / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _other_tokens(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (path,) = folder.glob(f"{name}*_input_ids_document.bin")
        content = bytearray(path.read_bytes())
        content[4] ^= 1
        path.write_bytes(content)

    return damage


def _other_tokenizer(folder: Path) -> None:
    path = folder / "hf" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|im_start|>"', '"<|in_start|>"'))


def _checkpoints(folder: Path) -> None:
    (folder / "used" / "iter_0000007").mkdir(parents=True)


def _small_heads(folder: Path) -> None:
    """Split the same weights into twice as many heads, of 16 channels."""
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["num_attention_heads"], config["num_key_value_heads"] = 8, 4
    path.write_text(json.dumps(config))


def _text(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


TRAININGS = ("train-sft", "train-grpo")
DATA = {"train-sft": "sft", "train-grpo": "prompts"}
REFUSALS = {
    **{
        f"{command}, {name}": Refusal(command, sets, fragments, damage)
        for command in TRAININGS
        for name, sets, fragments, damage in (
            ("existing run", (), ("runs/run", "exists"), _used_run),
            (
                "existing checkpoints",
                ("checkpoint.save=used",),
                ("checkpoint.save=", "step 7"),
                _checkpoints,
            ),
            ("name of another folder", ("run.name=../../etc",), ("run.name=../../etc",), None),
            ("run folder is a file", ("run.dir=rows.jsonl",), ("run.dir", "file"), None),
            (
                "missing checkpoint",
                ("checkpoint.resume=gone",),
                ("checkpoint.resume=gone",),
                None,
            ),
            ("other template", ("model.template=llama3",), ("model.template=llama3",), None),
            ("other tokenizer", (), ("tokenizer",), _other_tokenizer),
            ("no weights", (), ("hf", "weights"), _weights_gone),
            ("truncated weights", (), ("model.safetensors",), _weights_truncated),
            ("damaged data", (), (DATA[command], "checksum"), _other_tokens(DATA[command])),
        )
        for damage in (damage or (lambda folder: None),)
    },
    "train-sft, row longer than a micro-batch": Refusal(
        "train-sft",
        ("train.max_tokens_per_micro_batch=4",),
        ("train.max_tokens_per_micro_batch=4",),
    ),
    "train-grpo, all prompts too long": Refusal(
        "train-grpo", ("rollout.max_prompt_tokens=2",), ("rollout.max_prompt_tokens=2",)
    ),
    "train-grpo, reward file that cannot be imported": Refusal(
        "train-grpo",
        ("reward.sources=[{function: reward.py:score}]",),
        ("reward.py", "no_such_package"),
        _text("reward.py", "import no_such_package\ndef score(response, answer): return 0.0\n"),
    ),
    "train-grpo, reward file that exits": Refusal(
        "train-grpo",
        ("reward.sources=[{function: reward.py:score}]",),
        ("reward.py",),
        _text("reward.py", "import os\nos._exit(3)\ndef score(response, answer): return 0.0\n"),
    ),
    "train-grpo, ground truth that the verifier cannot use": Refusal(
        "train-grpo", ("reward.sources=[{verifier: code}]",), ("data.train=prompts",)
    ),
    **{
        f"{command}, head size without a kernel": Refusal(
            command, (), ("config.json", "num_attention_heads=8", "32, 64"), _small_heads
        )
        for command in ("train-grpo", "generate", "chat", "serve", "eval")
    },
    **{
        f"{command}, {key} with a control token": Refusal(
            command, (f'{key}=["</answer><|im_end|>"]',), (key, "<|im_end|>", "control token")
        )
        for command, key in (
            ("train-grpo", "rollout.sampling.stop"),
            ("eval", "eval.sampling.stop"),
            ("eval", "rollout.sampling.stop"),
            ("generate", "generate.stop"),
            ("chat", "chat.stop"),
        )
    },
    "eval, engine too short": Refusal(
        "eval",
        ("rollout.engine.max_model_len=20",),
        ("rollout.engine.max_model_len=20", "eval.max_response_tokens"),
    ),
    "train-grpo, fewer tokens per step than a sequence": Refusal(
        "train-grpo",
        ("rollout.engine.max_num_batched_tokens=150",),
        ("rollout.engine.max_num_batched_tokens=150", "200"),
    ),
    "train-grpo, engine longer than the model": Refusal(
        "train-grpo",
        ("rollout.engine.max_model_len=257",),
        ("rollout.engine.max_model_len=257", "256"),
    ),
    "generate, existing output": Refusal(
        "generate", (), ("generate.output=answers.jsonl", "exists"), _text("answers.jsonl", "")
    ),
    "generate, no weights": Refusal("generate", (), ("hf",), _weights_gone),
    "generate, truncated weights": Refusal(
        "generate", (), ("model.safetensors",), _weights_truncated
    ),
    "generate, wrong column": Refusal(
        "generate",
        (),
        ("questions.jsonl:1", "prompt"),
        _text("questions.jsonl", '{"question": "2+2?"}\n'),
    ),
    "generate, prompt too long": Refusal(
        "generate",
        ("rollout.engine.max_model_len=8",),
        ("questions.jsonl:1", "tokens"),
    ),
    "generate, template without its tokens": Refusal(
        "generate", ("generate.template=llama3",), ("llama3",)
    ),
    "chat, no weights": Refusal("chat", (), ("hf",), _weights_gone),
    "chat, truncated weights": Refusal("chat", (), ("model.safetensors",), _weights_truncated),
    "serve, no weights": Refusal("serve", (), ("hf",), _weights_gone),
    "serve, truncated weights": Refusal("serve", (), ("model.safetensors",), _weights_truncated),
    "serve, template without its tokens": Refusal("serve", ("serve.template=llama3",), ("llama3",)),
    "serve, address of another machine": Refusal(
        "serve", ("serve.host=192.0.2.1", "serve.api_key_file=rows.jsonl"), ("API key",)
    ),
    "eval, changed prompts": Refusal("eval", (), ("prompts",), _other_tokens("prompts")),
    "eval, other tokenizer": Refusal("eval", (), ("tokenizer",), _other_tokenizer),
    "eval, too long": Refusal(
        "eval", ("eval.max_response_tokens=500",), ("eval.max_response_tokens=500", "256")
    ),
    "eval, output that is a file": Refusal(
        "eval", ("evaluate.output=rows.jsonl",), ("evaluate.output=rows.jsonl", "folder")
    ),
    "chat, template without its tokens": Refusal("chat", ("chat.template=llama3",), ("llama3",)),
    "preprocess, wrong columns": Refusal(
        "preprocess", (), ("rows.jsonl:1",), _text("rows.jsonl", '{"question": "2+2?"}\n')
    ),
    "preprocess, not JSON": Refusal(
        "preprocess", (), ("rows.jsonl:1", "JSON"), _text("rows.jsonl", "2+2\n")
    ),
    "preprocess, no rows": Refusal(
        "preprocess", (), ("preprocess.input", "no rows"), _text("rows.jsonl", "\n")
    ),
    "preprocess, existing data": Refusal(
        "preprocess", ("preprocess.output_prefix=sft",), ("preprocess.output_prefix=sft",)
    ),
    "preprocess, prefix in a file": Refusal(
        "preprocess", ("preprocess.output_prefix=rows.jsonl/x",), ("rows.jsonl",)
    ),
    "preprocess, key without effect": Refusal(
        "preprocess", ("preprocess.append_eod=true",), ("preprocess.append_eod",)
    ),
    "convert-ckpt, truncated weights": Refusal(
        "convert-ckpt", (), ("model.safetensors",), _weights_truncated
    ),
    "convert-ckpt, result in a file": Refusal(
        "convert-ckpt", ("convert.save=rows.jsonl/mcore",), ("rows.jsonl",)
    ),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the inputs of all commands."""
    folder = tmp_path_factory.mktemp("originals")
    save_model(folder / "hf", tied=False, positions=256)
    inputs = [str(write_rows(folder / "rows.jsonl", ROWS))]
    for kind in ("sft", "prompts"):
        settings = {
            "input": inputs,
            "tokenizer": str(folder / "hf"),
            "handler": "alpaca",
            "template": "qwen",
            "kind": kind,
            "output_prefix": str(folder / kind),
        }
        preprocess.run(Config.model_validate({"preprocess": settings}))
    (folder / "questions.jsonl").write_text(json.dumps({"prompt": "2+2?"}) + "\n")
    for command, settings in FILES.items():
        (folder / f"{command}.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the inputs, which is the working directory."""
    copy = shutil.copytree(originals, tmp_path / "copy")
    monkeypatch.chdir(copy)
    return copy


def _arguments(command: str, sets: tuple[str, ...]) -> list[str]:
    words = ["convert-ckpt", "hf2mcore"] if command == "convert-ckpt" else [command]
    return [*words, "-c", f"{command}.yaml", *(word for s in sets for word in ("--set", s))]


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_dry_run_and_doctor_refuse_what_the_command_refuses(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
):
    refusal = REFUSALS[name]
    refusal.damage(folder)
    arguments = _arguments(refusal.command, refusal.sets)
    before = sorted(folder.rglob("*"))
    assert msrl(*arguments, "--dry-run") == 2
    dry = capfd.readouterr().err.strip()
    assert_mentions(dry, *refusal.fragments)
    assert sorted(folder.rglob("*")) == before
    for_command = arguments[2:] if refusal.command == "convert-ckpt" else arguments[1:]
    doctor = ("doctor", "--no-imports", "--platform", "cpu", "--for", refusal.command)
    assert msrl(*doctor, *for_command) == 2
    assert dry.splitlines()[-1] in capfd.readouterr().out
    assert msrl(*arguments) == 2
    assert capfd.readouterr().err.strip().splitlines()[-1] == dry.splitlines()[-1]


@pytest.mark.parametrize("command", FILES)
def test_a_dry_run_of_valid_inputs_prints_the_plan_and_writes_nothing(
    command: str, folder: Path, capfd: pytest.CaptureFixture[str]
):
    before = sorted(folder.rglob("*"))
    assert msrl(*_arguments(command, ()), "--dry-run") == 0
    assert_mentions(capfd.readouterr().out, command, "nothing was started", "inputs")
    assert sorted(folder.rglob("*")) == before


def test_trainings_warn_about_a_model_that_can_generate_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    make_model(tied=False, head_dim=16, positions=256).save_pretrained("hf")
    assert msrl(*_arguments("train-sft", ()), "--dry-run") == 0
    shown = capfd.readouterr().err
    assert_mentions(shown, "warning", "hidden_size=64 / num_attention_heads=4", "32", "train-grpo")
    doctor = ("doctor", "--no-imports", "--platform", "cpu", "--for", "train-sft")
    msrl(*doctor, "-c", "train-sft.yaml")
    assert_mentions(capfd.readouterr().err, "warning", "num_attention_heads=4")
    assert msrl(*_arguments("train-grpo", ()), "--dry-run") == 2
    assert_mentions(capfd.readouterr().err, "num_attention_heads=4")


def test_a_dry_run_needs_no_device(folder: Path, capfd: pytest.CaptureFixture[str]):
    for command in TRAININGS:
        assert msrl(*_arguments(command, ("cluster.platform=npu",)), "--dry-run") == 0
        assert msrl(*_arguments(command, ("cluster.platform=npu",))) == 2
        assert_mentions(capfd.readouterr().err, "cluster.platform=npu")


def test_a_conversion_of_a_config_alone_has_a_plan(folder: Path, capfd: pytest.CaptureFixture[str]):
    _weights_gone(folder)
    assert msrl(*_arguments("convert-ckpt", ()), "--dry-run") == 0
    assert_mentions(capfd.readouterr().out, "config.json", "no weights")


def test_a_dry_run_checks_the_ports_of_a_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MSRL_STATE_DIR", str(folder / "state"))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        for end in (["--dry-run"], []):
            assert msrl("cluster", "up", "--port", port, "--devices", "1", *end) == 2
            assert_mentions(capfd.readouterr().err, f"--port {port}")
    for end in (["--dry-run"], []):
        assert msrl("cluster", "join", "127.0.0.1:7000", "--devices", "1", *end) == 2
        assert_mentions(capfd.readouterr().err, "127.0.0.1:7000", "loopback")


def test_a_folder_of_one_iteration_names_the_checkpoint_above_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mcore" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    iteration = str(tmp_path / "mcore" / "iter_0000001")
    assert msrl("train-sft", "--model", iteration, "--data", "d", "--steps", "1", "--dry-run") == 2
    assert f"{tmp_path / 'mcore'}?" in capsys.readouterr().err
