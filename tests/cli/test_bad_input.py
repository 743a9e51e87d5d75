"""Bad input to the commands: one message on standard error, exit code 2, no files, no workers."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import tiny_checkpoints
from config_inputs import GENERATING, make_model, make_working_folder
from msrl.data.manifest import manifest_path, read_manifest
from msrl.data.templates.files import load_template
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from support import assert_mentions, mentions
from test_cli import msrl
from tiny_qwen2 import make_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory with the inputs of a training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "1+1=", "output": "2"}\n')
    return make_working_folder(tmp_path, **GENERATING)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message of a command that exits with 2."""
    before = sorted(Path.cwd().rglob("*"))
    assert msrl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert sorted(Path.cwd().rglob("*")) == before
    return captured.err.strip()


SFT, RL = ("train-sft", "-c", "sft.yaml"), ("train-grpo", "-c", "grpo.yaml")
PREPROCESS = ("preprocess", "--input", "rows.jsonl", "--handler", "alpaca", "--tokenizer", "model",
              "--template", "qwen", "--output-prefix", "out/rows")  # fmt: skip
HF2MCORE = ("convert-ckpt", "hf2mcore", "--load", "model", "--save", "out")
MANY = "--set=cluster.devices_per_node=2"


@pytest.mark.sample(14)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SFT, "--set", "model.path=gone"), ("--set: model.path=gone", "folder")),
        ((*RL, "--set", "model.path=gone"), ("--set: model.path=gone", "folder")),
        (("train-sft", "-c", "gone.yaml"), ("gone.yaml", "file")),
        ((*PREPROCESS, "--date", "26 Jul"), ("--date: preprocess.date=26 Jul", "YYYY-MM-DD")),
        (("convert-ckpt", "hf2mcore", "--load", "gone", "--save", "out"),
        ("--load: convert.load=gone", "folder")),
        (("generate", "--model", "gone", "--prompt", "x"),
        ("--model: generate.model=gone", "folder")),
        ((*SFT, "--set", "train.parallel.tp=8"), ("--set: train.parallel.tp=8", "KV heads")),
        ((*HF2MCORE, "--tp", "8"), ("convert.tp=8", "KV heads")),
        ((*HF2MCORE, "--pp", "2", "--vpp", "3"), ("--vpp: convert.vpp=3", "virtual", "layers")),
        ((*HF2MCORE, "--pp", "2", "--num-layer-list", "1,2"),
        ("convert.num_layer_list=1,2", "4 layers")),
        ((*HF2MCORE, "--pp", "5", "--noop-layers", "7"),
        ("--noop-layers: convert.noop_layers=7", "positions", "4")),
        ((*HF2MCORE, "--ep", "2"), ("--ep: convert.ep=2", "experts")),
        ((*SFT, "--set", "train.parallel.pp=3"), ("--set: train.parallel.pp=3", "4 layers")),
        ((*SFT, "--set", "train.stepps=3"), ("--set: train.stepps=3", "key", "'steps'")),
        ((*SFT, "--set", "train.steps=many"), ("--set: train.steps=many",)),
        ((*SFT, "--set", "train.global_batch=7", "--set", "train.micro_batch=2"),
        ("train.global_batch=7", "multiple of 2")),
        ((*SFT, MANY, "--set", "train.global_batch=7"),
        ("train.global_batch=7", "multiple of 2", "data parallel")),
        ((*RL, "--set", "train.updates.samples_per_update=5"),
        ("train.updates.samples_per_update=5", "samples")),
        ((*RL, MANY, "--set", "train.updates.samples_per_update=1"),
        ("train.updates.samples_per_update=1", "multiple of 2")),
        ((*RL, "--set", "rollout.samples_per_prompt=1"),
        ("rollout.samples_per_prompt=1", "group_norm", "prompt")),
        ((*RL, "--set=reward.sources=[{verifier: akk}]"),
        ("sources.0.verifier=akk", "rewards.verifiers")),
        ((*RL, "--set", "algo.advantage.estimator=rlo"),
        ("algo.advantage.estimator=rlo", "'rloo'")),
        ((*SFT, "--set", "model.template=qwen_r2"), ("model.template=qwen_r2", "'qwen_r1'")),
        ((*RL, "--set", "rollout.max_response_tokens=500"),
        ("rollout.max_response_tokens=500", "512")),
        ((*SFT, "--set", "data.seq_length=513"), ("data.seq_length=513", "512")),
        ((*SFT, "--set", "data.train=other"), ("data.train=other", "prefix")),
        ((*SFT, "--resume", "gone"), ("checkpoint.resume=gone",)),
        (SFT, ("data_packed_input_ids_document.idx", "0 bytes", "index")),
        (RL, ("model", "tokenizer.json", "vocabulary")),
        (("generate", "--model", "model", "--prompt", "a\udcff"),
        ("--prompt", "'a\\udcff'", "UTF-8")),
        (("preprocess", "gone\udcff.jsonl", "--handler", "gsm8k"),
        ("--input", "'gone\\udcff.jsonl'", "UTF-8")),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...],
    message: tuple[str, ...]
):  # fmt: skip
    message_text = refused(capsys, *arguments)
    assert_mentions(message_text, *message)
    assert len(message_text.splitlines()) == 1


LONG = "x" * 5000
SETS = ("model.path", "model.tokenizer", "data.train", "checkpoint.load", "run.dir", "run.name")
NAMED = (
    *(f"train-sft -c sft.yaml --set {key}={LONG}" for key in SETS),
    f"train-sft -c {LONG}", f"train-sft --config-name {LONG}",
    f"train-sft -c sft.yaml --resume {LONG}", f"train-grpo -c grpo.yaml --set data.eval={LONG}",
    f"config show -c {LONG}", f"config validate -c {LONG}", f"config import --from roll {LONG}",
    f"report {LONG}", f"view {LONG}", f"view model --output {LONG}", f"doctor -c {LONG}",
    f"convert-ckpt inspect {LONG}", f"convert-ckpt hf2mcore --load {LONG} --save out",
    f"preprocess {LONG}", f"generate --model {LONG} --prompt x", f"chat --model {LONG}",
    f"serve {LONG}", f"eval {LONG} --data data", f"diagnose mismatch {LONG}",
)  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("line", NAMED, ids=lambda line: line.replace(LONG, "LONG"))
def test_a_name_that_is_too_long_for_a_file_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
):
    assert len(refused(capsys, *line.split())) < 3000


@pytest.mark.parametrize(
    "line", ["report loop", "view loop", "chat --model loop", "config show -c loop"]
)
def test_a_link_that_leads_to_itself_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
):
    Path("loop").symlink_to("loop")
    assert "loop" in refused(capsys, *line.split())


@pytest.mark.parametrize("text", ['model: {path: "a%sb"}', 'data: {blend: {"a%sb": 1}}'])
@pytest.mark.parametrize(
    ("character", "keyword"), [("\\0", "null character"), ("\\ud800", "surrogate")]
)
def test_a_null_character_in_a_configuration_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, character: str, keyword: str
):
    Path("sft.yaml").write_text(text % character)
    assert_mentions(refused(capsys, *SFT), "sft.yaml:1", keyword)


def test_damaged_prompts_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]):
    make_tokenizer().save_pretrained(folder / "model")
    assert_mentions(refused(capsys, *RL), "data_packed_input_ids_document.idx", "0 bytes", "index")


def test_an_unknown_architecture_is_refused_with_the_known_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    make_model(folder / "other", architectures=["MambaForCausalLM"], model_type="mamba")
    for arguments in (
        (*SFT, "--set", "model.path=other"),
        ("convert-ckpt", "hf2mcore", "--load", "other", "--save", "out"),
    ):
        message_text = refused(capsys, *arguments)
        assert (
            "MambaForCausalLM" in message_text
            and "Qwen2ForCausalLM" in message_text
            and len(message_text.splitlines()) == 1
        )


def test_truncated_weights_are_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    tiny_checkpoints.save(folder / "cut")
    whole = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    message_text = refused(capsys, "convert-ckpt", "hf2mcore", "--load", "cut", "--save", "out")
    assert "model.safetensors" in message_text and len(message_text.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([], (), ("no rows",)),
        (
            [{"question": "x", "answer": "#### 1"}],
            ("--output-prefix", "out/"),
            ("output_prefix=out/", "folder"),
        ),
        (
            [{"question": "x", "answer": "#### 1"}],
            ("--handler", "gsm9k"),
            ("preprocess.handler=gsm9k", "'gsm8k'"),
        ),
        (
            [{"question": "x", "answer": "#### 1"}],
            ("--template", "qwen_r2"),
            ("preprocess.template=qwen_r2", "'qwen_r1'"),
        ),
        (
            [{"question": "x", "answer": "#### 1"}],
            ("--tokenizer", "gone"),
            ("tokenizer=gone", "folder"),
        ),
    ],
)
def test_a_mistake_in_preprocessing_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], rows: list[object], flags: tuple[str, ...],
    message: tuple[str, ...]
):  # fmt: skip
    make_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {
        "--handler": "gsm8k",
        "--template": "qwen",
        "--tokenizer": "tokenizer",
        "--output-prefix": "out",
    }
    chosen = {**right, **dict(zip(flags[::2], flags[1::2], strict=True))}
    arguments = [argument for pair in chosen.items() for argument in pair]
    message_text = refused(capsys, "preprocess", "--input", "rows.jsonl", *arguments)
    assert_mentions(message_text, *message)
    assert len(message_text.splitlines()) == 1


def test_a_port_in_use_is_reported_at_start(folder: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message_text = refused(capsys, "cluster", "up", "--host", "127.0.0.1", "--port", str(port))
    assert str(port) in message_text and "taken" in message_text


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "user: " + "{a: " * 5_000, "- " * 20_000, "user: " + "9" * 5_000]
)
def test_a_template_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    keyword = "user" if "9" in text else "nested"
    with pytest.raises(MsrlError, match=mentions("mine.yaml", keyword)):
        load_template(str(file))


@pytest.mark.parametrize(
    "text", ['{"files": ' + "[" * 50_000, '{"files": {"a": {"bytes": 1e999, "crc32": ""}}}']
)
def test_a_data_manifest_with_absurd_values_is_refused(tmp_path: Path, text: str) -> None:
    manifest_path(str(tmp_path / "data")).write_text(text)
    with pytest.raises(MsrlError, match=mentions("manifest")):
        read_manifest(str(tmp_path / "data"))


@pytest.mark.parametrize("system", ["mindspeed-llm", "mindspeed-rl", "lightrft"])
def test_a_script_that_is_not_utf8_is_refused(tmp_path: Path, system: str) -> None:
    file = tmp_path / "run.sh"
    file.write_bytes(b"python pretrain_gpt.py --num-layers \xa3\n")
    with pytest.raises(MsrlError, match=mentions("run.sh", "UTF-8")):
        translate_arguments(system, [str(file)])
