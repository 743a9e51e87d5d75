"""Bad input to the commands: one clear message on standard error, exit code 2, nothing written, no worker started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import tiny_checkpoints
from config_inputs import make_model, make_working_folder
from test_cli import msrl
from tiny_qwen2 import make_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that trainings need."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that exits with 2."""
    before = sorted(Path.cwd().rglob("*"))
    assert msrl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert sorted(Path.cwd().rglob("*")) == before
    return captured.err.strip()


SFT, RL = ("train-sft", "-c", "sft.yaml"), ("train-grpo", "-c", "grpo.yaml")
HF2MCORE = ("convert-ckpt", "hf2mcore", "--load", "model", "--save", "out")
MANY = "--set=cluster.devices_per_node=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SFT, "--set", "model.path=gone"), "--set: model.path=gone: there is no such folder"),
        ((*RL, "--set", "model.path=gone"), "--set: model.path=gone: there is no such folder"),
        (("train-sft", "-c", "gone.yaml"), "gone.yaml: there is no such file"),
        (("convert-ckpt", "hf2mcore", "--load", "gone", "--save", "out"), "--load: convert.load=gone: there is no such folder"),
        (("generate", "--model", "gone", "--prompt", "x"), "--model: generate.model=gone: there is no such folder"),
        ((*SFT, "--set", "train.parallel.tp=8"), "--set: train.parallel.tp=8: must divide the model's 4 query groups"),
        ((*HF2MCORE, "--tp", "8"), "must divide the model's 4 query groups"),
        ((*HF2MCORE, "--pp", "2", "--vpp", "3"), "--vpp: convert.vpp=3: layers per virtual stage must divide the 2 layers of each"),
        ((*HF2MCORE, "--pp", "2", "--num-layer-list", "1,2"), "convert.num_layer_list=1,2: has the sum 3, but the model has 4 layers"),
        ((*HF2MCORE, "--pp", "5", "--noop-layers", "7"), "--noop-layers: convert.noop_layers=7: must be different positions from 0 to 4"),
        ((*HF2MCORE, "--ep", "2"), "--ep: convert.ep=2: the model has no experts; leave it out"),
        ((*SFT, "--set", "train.parallel.pp=3"), "--set: train.parallel.pp=3: must divide the model's 4 layers"),
        ((*SFT, "--set", "train.stepps=3"), "--set: train.stepps=3: there is no such key; did you mean 'steps'?"),
        ((*SFT, "--set", "train.steps=many"), "--set: train.steps=many: must be a whole number"),
        ((*SFT, "--set", "train.global_batch=7", "--set", "train.micro_batch=2"), "train.global_batch=7: must be a multiple of 2"),
        ((*SFT, MANY, "--set", "train.global_batch=7"), "train.global_batch=7: must be a multiple of 2 (data parallel 2"),
        ((*RL, "--set", "train.updates.samples_per_update=5"), "train.updates.samples_per_update=5: must divide the samples of a step"),
        ((*RL, MANY, "--set", "train.updates.samples_per_update=1"), "train.updates.samples_per_update=1: must be a multiple of 2"),
        ((*RL, "--set", "rollout.samples_per_prompt=1"), "rollout.samples_per_prompt=1: group_norm compares the completions of a prompt"),
        ((*RL, "--set=reward.sources=[{verifier: akk}]"), "sources.0.verifier=akk: there is no such plugin in rewards.verifiers; known: "),
        ((*RL, "--set", "algo.advantage.estimator=rlo"), "did you mean 'rloo'?"),
        ((*SFT, "--set", "model.template=qwen_r2"), "did you mean 'qwen_r1'?"),
        ((*RL, "--set", "rollout.max_response_tokens=500"), "the model takes at most 512"),
        ((*SFT, "--set", "data.seq_length=513"), "data.seq_length=513: the model takes at most 512 tokens"),
        ((*SFT, "--set", "data.train=other"), "there is no preprocessed data of this prefix"),
        ((*SFT, "--resume", "gone"), "checkpoint.resume=gone"),
        (SFT, "data_packed_input_ids_document.idx: 0 bytes is too short for an index"),
        (RL, "model: holds no vocabulary, as tokenizer.json is; copy it there"),
        (("generate", "--model", "model", "--prompt", "a\udcff"), "--prompt: 'a\\udcff' is not UTF-8 text"),
        (("preprocess", "gone\udcff.jsonl", "--handler", "gsm8k"), "--input: 'gone\\udcff.jsonl' is not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
):  # fmt: skip
    said = refused(capsys, *arguments)
    assert message in said
    assert len(said.splitlines()) == 1


def test_damaged_prompts_are_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    make_tokenizer().save_pretrained(folder / "model")
    assert "data_packed_input_ids_document.idx: 0 bytes is too short for an index" in refused(capsys, *RL)


def test_an_unknown_architecture_is_refused_with_the_known_ones(folder: Path, capsys: pytest.CaptureFixture[str]):
    make_model(folder / "other", architectures=["MambaForCausalLM"], model_type="mamba")
    for arguments in ((*SFT, "--set", "model.path=other"), ("convert-ckpt", "hf2mcore", "--load", "other", "--save", "out")):
        said = refused(capsys, *arguments)
        assert "MambaForCausalLM" in said and "Qwen2ForCausalLM" in said and len(said.splitlines()) == 1


def test_truncated_weights_are_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    tiny_checkpoints.save(folder / "cut")
    whole = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    said = refused(capsys, "convert-ckpt", "hf2mcore", "--load", "cut", "--save", "out")
    assert "model.safetensors" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([], (), "nothing to write: there are no rows"),
        ([{"question": "x", "answer": "#### 1"}], ("--output-prefix", "out/"), "output_prefix=out/: is a folder alone; add how the names"),
        ([{"question": "x", "answer": "#### 1"}], ("--handler", "gsm9k"), "did you mean 'gsm8k'?"),
        ([{"question": "x", "answer": "#### 1"}], ("--template", "qwen_r2"), "did you mean 'qwen_r1'?"),
        ([{"question": "x", "answer": "#### 1"}], ("--tokenizer", "gone"), "gone: there is no such folder"),
    ],
)
def test_a_mistake_in_preprocessing_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], rows: list[object], flags: tuple[str, ...], message: str
):  # fmt: skip
    make_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {"--handler": "gsm8k", "--template": "qwen", "--tokenizer": "tokenizer", "--output-prefix": "out"}
    chosen = {**right, **dict(zip(flags[::2], flags[1::2], strict=True))}
    arguments = [part for pair in chosen.items() for part in pair]
    said = refused(capsys, "preprocess", "--input", "rows.jsonl", *arguments)
    assert message in said and len(said.splitlines()) == 1


def test_a_port_that_is_taken_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "cluster", "up", "--host", "127.0.0.1", "--port", str(port))
    assert str(port) in said and "taken" in said
