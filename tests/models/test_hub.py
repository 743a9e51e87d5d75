"""Models and datasets of a hub, downloaded by huggingface_hub from a server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub, Repository, fake_hub, folder_files
from msrl.errors import MsrlError
from msrl.hub import HubName, download, is_without_weights, parse_name, selected_hub
from support import assert_mentions, mentions
from tiny_qwen2 import save_model

MODEL, DATASET = "acme/tiny", "acme/sums"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_model(folder, tied=True)
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    files = folder_files(model)
    extras = {"consolidated.safetensors": b"x", "onnx/model.onnx": b"x", "README.md": b"x"}
    rows = "".join(
        json.dumps({"instruction": f"{i}+{i}=", "output": str(2 * i)}) + "\n" for i in range(9)
    )
    with fake_hub() as hub:
        repository = hub.repositories[f"models/{MODEL}"] = Repository()
        repository.commit({**files, **extras}, "v1")
        repository.commit({**files, **extras, "notes.txt": b"second"}, "main")
        hub.repositories["models/acme/gated"] = Repository(is_gated=True)
        data = hub.repositories[f"datasets/{DATASET}"] = Repository()
        data.commit(
            {"train/a.jsonl": rows.encode(), "test/a.jsonl": rows.encode(), "README.md": b"x"},
            "main",
        )
        yield hub


def msrl(hub: FakeHub, folder: Path, *arguments: str, **environment: str):
    """Run a command in `folder` with an empty cache of the hub in it."""
    offline = environment.pop("offline", "") == "yes"
    return subprocess.run(
        [sys.executable, "-m", "msrl", *arguments],
        cwd=folder,
        env={**hub.environment(folder / "cache", offline=offline), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_name_is_not_a_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert parse_name("Qwen/Qwen2.5-7B") == HubName("Qwen/Qwen2.5-7B", None)
    assert parse_name("Qwen/Qwen2.5-7B@v1.0") == HubName("Qwen/Qwen2.5-7B", "v1.0")
    assert parse_name("models/other@main") == HubName("models/other", "main")
    for path in ("models/qwen", "models/other", "qwen", "/models/qwen", "./a/b", "a/b/c", "../a"):
        assert parse_name(path) is None


def test_the_hub_is_selected_by_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MSRL_HUB", raising=False)
    assert selected_hub() == "hf"
    monkeypatch.setenv("MSRL_HUB", "none")
    with pytest.raises(MsrlError, match=mentions("folder not found", "MSRL_HUB=none")):
        download(HubName(MODEL, None), "metadata")
    monkeypatch.setenv("MSRL_HUB", "github")
    with pytest.raises(MsrlError, match=mentions("MSRL_HUB=github", "modelscope")):
        selected_hub()
    monkeypatch.setenv("MSRL_HUB", "modelscope")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MsrlError, match=mentions("modelscope", "pip install modelscope")):
        download(HubName(MODEL, None), "metadata")


def test_modelscope_receives_the_revision_and_the_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in with the signature of modelscope 1.2x, which is not installed here."""
    (tmp_path / "modelscope.py").write_text(
        "calls = []\n"
        "def snapshot_download(model_id, revision=None, allow_patterns=None,"
        " ignore_patterns=None):\n"
        "    calls.append((model_id, revision, allow_patterns))\n"
        f"    return {str(tmp_path)!r}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "modelscope", raising=False)
    monkeypatch.setenv("MSRL_HUB", "modelscope")
    snapshot = download(HubName(MODEL, "v2"), "weights")
    assert (snapshot.folder, str(snapshot.name)) == (tmp_path, f"{MODEL}@v2")
    calls = sys.modules["modelscope"].calls
    assert [call[:2] for call in calls] == [(MODEL, "v2")] * 2
    assert "*.safetensors" in calls[0][2] and "*.bin" in calls[1][2]


def test_a_snapshot_without_weights_is_recognized(tmp_path: Path):
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    assert is_without_weights(folder) and not is_without_weights(tmp_path)
    (folder / "model.safetensors").touch()
    assert not is_without_weights(folder)


@pytest.mark.full
@pytest.mark.slow
def test_a_model_of_the_hub_is_converted_and_later_read_from_the_cache(
    hub: FakeHub, tmp_path: Path
):
    command = ("convert-ckpt", "hf2mcore", "--load", f"{MODEL}@v1", "--tp", "2")
    first = msrl(hub, tmp_path, *command, "--save", "first")
    assert first.returncode == 0, first.stderr
    assert {name.rpartition("/")[2] for name in hub.downloads} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    unused = ("consolidated", "onnx", "README", "notes")
    assert not [name for name in hub.downloads if any(pattern in name for pattern in unused)]
    hub.downloads.clear()
    second = msrl(hub, tmp_path, *command, "--save", "second", offline="yes")
    assert second.returncode == 0, second.stderr
    assert not hub.downloads
    assert (tmp_path / "first" / "hf" / "config.json").read_bytes() == (
        tmp_path / "second" / "hf" / "config.json"
    ).read_bytes()


@pytest.mark.slow
def test_data_and_tokenizer_of_the_hub_are_preprocessed_and_a_dry_run_records_the_commit(
    hub: FakeHub, tmp_path: Path
):
    command = ["preprocess", "--tokenizer", MODEL, "--handler", "alpaca", "--template", "qwen"]
    command += ["--output-prefix", "data"]
    several = msrl(hub, tmp_path, *command, "--input", DATASET)
    assert several.returncode == 2
    assert_mentions(several.stderr, "preprocess.input", DATASET, "test/a.jsonl", "PATTERN")
    result = msrl(hub, tmp_path, *command, "--input", f"{DATASET}:train/*.jsonl")
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "data_manifest.json").read_text())
    assert manifest["num_examples"] == 9
    assert not [name for name in hub.downloads if "safetensors" in name]

    rows = f"{DATASET}:train/*.jsonl"
    settings = ["--model", MODEL, "--data", rows, "--steps", "1", "--platform", "cpu"]
    settings += ["--set", "train.global_batch=2", "--set", "train.micro_batch=1"]
    dry = msrl(hub, tmp_path, "train-sft", *settings, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    commit = hub.repositories[f"models/{MODEL}"].names["main"]
    assert f"model.path: {MODEL}@{commit}" in dry.stdout.replace('"', "")
    data_commit = hub.repositories[f"datasets/{DATASET}"].names["main"]
    name = f"{DATASET}@{data_commit}:train/*.jsonl"
    assert f"data.train: {name}" in dry.stdout.replace('"', "")
    assert_mentions(dry.stdout, f"{name}, row 1:", "trained")
    assert str(tmp_path / "cache") not in dry.stdout
    assert not [name for name in hub.downloads if "safetensors" in name]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("acme/absent", ("acme/absent", "HF_TOKEN")),
        ("acme/gated", ("acme/gated", "permission", "HF_TOKEN")),
        (f"{MODEL}@v9", (f"{MODEL}@v9", "revision v9")),
    ],
)
def test_what_a_hub_refuses_is_one_message_beside_the_other_mistakes(
    hub: FakeHub, tmp_path: Path, name: str, fragments: tuple[str, ...]
):
    mistake = ("--set", "train.parallel.sp=true")
    result = msrl(hub, tmp_path, "train-sft", "--model", name, "--steps", "1", *mistake)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and "Traceback" not in result.stderr
    (line,) = [line for line in lines if "model.path" in line]
    assert_mentions(line, *fragments)
    assert "train.parallel.sp" in result.stderr


@pytest.mark.full
@pytest.mark.slow
def test_an_unreachable_hub_is_one_message(hub: FakeHub, tmp_path: Path):
    """The port 9 of loopback has no server."""
    for environment in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"offline": "yes"}):
        result = msrl(hub, tmp_path, "chat", "--model", MODEL, **environment)
        assert result.returncode == 2, result.stderr
        assert_mentions(result.stderr, "chat.model", MODEL, "reached", "HF_ENDPOINT", "MSRL_HUB")
        assert "Traceback" not in result.stderr
