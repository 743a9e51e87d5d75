"""Trainings that read rows: the cache of preprocessed rows, dry runs, and messages."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from msrl.config.schema import Config
from msrl.config.secrets import recorded
from msrl.data.files import location
from msrl.data.manifest import all_paths
from msrl.errors import MsrlError
from msrl.plan.run_plan import RunPlan, resolve
from msrl.workflows import preprocess
from msrl.workflows.row_cache import prepare_rows
from support import assert_mentions, mentions
from tiny_qwen2 import save_model

CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"{i}+{i}="},
            {"role": "assistant", "content": "x" * i},
        ]
    }
    for i in range(1, 7)
]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no"} for i in range(6)]
LABELED = [{"prompt": f"{i}=", "completion": f"{i}", "label": i % 2 == 0} for i in range(6)]
STEPS = [{"prompt": f"{i}?", "completions": ["a", "b"], "labels": [True, False]} for i in range(6)]
TEXTS = [{"text": f"document {i}"} for i in range(6)]
OPTIONS = {"placeholder_token": "#"}
PROCESS = {"algo": {"reward_model": {"kind": "process"}}, "preprocess": {"options": OPTIONS}}
KTO = {"algo": {"preference": {"loss": "kto"}}}
PRETRAIN = {"data": {"handler": "pretrain", "seq_length": 8}}
# Rows, command, sections of the configuration, and the settings of the same `msrl preprocess`.
KINDS: dict[str, tuple[list[Any], str, dict[str, Any], dict[str, Any]]] = {
    "sft": (CHAT, "train-sft", {}, {"handler": "auto", "template": "native"}),
    "prompts": (
        CHAT,
        "train-grpo",
        {},
        {"handler": "auto", "template": "native", "kind": "prompts"},
    ),
    "pairs": (PAIRS, "train-dpo", {}, {"handler": "pairs", "template": "native"}),
    "labeled": (LABELED, "train-dpo", KTO, {"handler": "labeled", "template": "native"}),
    "steps": (STEPS, "train-rm", PROCESS, {"handler": "steps", "options": OPTIONS}),
    "pretrain": (TEXTS, "train-sft", PRETRAIN, {"handler": "pretrain"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, tied=True, positions=128)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSRL_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def plan(
    folder: Path, rows: object, command: str = "train-sft", **sections: Mapping[str, Any]
) -> RunPlan:
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": str(rows)},
        "train": {"steps": 2, "global_batch": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return resolve(Config.model_validate(values, strict=False), command)


def prefix_of(run: RunPlan, *, keep: bool = True) -> str:
    with prepare_rows(run, keep=keep) as ready:
        return ready.prefix(str(run.data.train))


def contents(prefix: str) -> dict[str, bytes]:
    files = [path for path in all_paths(prefix) if path.is_file()]
    return {path.name.removeprefix(Path(prefix).name): path.read_bytes() for path in files}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_become_the_data_of_preprocess_bit_by_bit(
    kind: str, model: Path, tmp_path: Path
):
    rows, command, sections, settings = KINDS[kind]
    file = write(tmp_path / "rows.jsonl", rows)
    values = {"input": [str(file)], "tokenizer": str(model), **settings}
    values["output_prefix"] = str(tmp_path / "own")
    preprocess.run(Config.model_validate({"preprocess": values}, strict=False))
    run = plan(model, file, command, **sections)
    with prepare_rows(run, keep=True) as ready:
        dataset = ready.datasets[str(file)]
        assert dataset.manifest is not None and dataset.manifest.kind == kind
        assert contents(dataset.prefix) == contents(str(tmp_path / "own"))
        if kind == "prompts":
            assert (
                set(ready.sampling.stop_token_ids) == set(dataset.manifest.stop_token_ids) != set()
            )


def test_a_second_start_reads_the_cache_and_tokenizes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    first = prefix_of(plan(model, file))
    monkeypatch.setattr(preprocess, "write", _fail)
    same = write(tmp_path / "renamed.jsonl", CHAT)
    assert prefix_of(plan(model, same, preprocess={"workers": 3})) == first
    assert prefix_of(plan(model, same), keep=False) == first


def test_a_second_start_repeats_what_was_not_read(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "rows.jsonl", [{**CHAT[0], "source": "web"}, {"x": 1}])
    run = plan(model, file, preprocess={"on_bad_row": "drop"})
    prefix = prefix_of(run)
    first = capsys.readouterr().err.splitlines()[:-1]
    assert "columns not read: source (1 row)" in first and f"{prefix}_bad_rows.jsonl" in first[-1]
    assert prefix_of(run) == prefix
    assert capsys.readouterr().err.splitlines()[:-1] == first


def _fail(*arguments: object) -> None:
    raise AssertionError("rows were preprocessed again")


def test_all_that_changes_tokens_makes_another_entry(model: Path, tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", CHAT)
    handler = tmp_path / "own.py"
    handler.write_text(
        "import beside\ndef read(row):\n    return row['messages'][: beside.NUM]\n",
        encoding="utf-8",
    )
    (tmp_path / "beside.py").write_text("from inner.deep import NUM\n", encoding="utf-8")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "deep.py").write_text("NUM = 2\n", encoding="utf-8")
    template = tmp_path / "own.yaml"
    template.write_text('user: "U {{content}} A "\nassistant: "{{content}}{{eos}}"\n')
    tokenizer = tmp_path / "tokenizer"
    save_model(tokenizer, tied=True, positions=128)
    own = {"handler": f"{handler}:read", "template": str(template)}

    def current() -> str:
        run = plan(tokenizer, file, preprocess=own)
        return prefix_of(run)

    def edit(path: Path, old: str, new: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    changes: list[Callable[[], object]] = [
        lambda: edit(file, "1+1", "1+2"),
        lambda: edit(handler, "row['messages']", "row['messages'][-2:]"),
        lambda: edit(tmp_path / "beside.py", "NUM", "NUM  # two turns"),
        lambda: edit(tmp_path / "inner" / "deep.py", "2", "4"),
        lambda: edit(template, "U ", "V "),
        lambda: edit(tokenizer / "tokenizer_config.json", "{", '{"x": 1, '),
        lambda: own.update(seq_length=90),
        lambda: own.update(template="native"),
        lambda: edit(tokenizer / "chat_template.jinja", "assistant", "model"),
    ]
    prefixes = [current()]
    for change in changes:
        change()
        prefixes.append(current())
    assert len(set(prefixes)) == len(changes) + 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", ["changed", "manifest", "notes", "missing", "incomplete"])
def test_a_damaged_entry_is_preprocessed_again(
    damage: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    prefix = prefix_of(plan(model, file))
    expected = contents(prefix)
    ids = Path(f"{prefix}_packed_input_ids_document.bin")
    if damage == "changed":
        data = bytearray(ids.read_bytes())
        data[0] ^= 1
        ids.write_bytes(data)
    elif damage == "manifest":
        manifest = Path(f"{prefix}_manifest.json")
        manifest.write_text(manifest.read_text().replace("native", "nativf"))
    elif damage == "notes":
        (ids.parent / "notes.json").write_text('["lines')
    elif damage == "missing":
        ids.unlink()
    else:
        Path(f"{prefix}_manifest.json").unlink()
    assert prefix_of(plan(model, file)) == prefix
    assert contents(prefix) == expected
    assert "again" in capsys.readouterr().err


def test_a_dry_run_writes_nothing_to_the_cache_and_leaves_no_files(
    model: Path, tmp_path: Path, cache: Path
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    with prepare_rows(plan(model, file), keep=False) as ready:
        prefix = ready.prefix(str(file))
        assert contents(prefix)
    assert not contents(prefix) and not cache.exists()


def test_runs_that_start_at_once_preprocess_the_rows_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    original, calls, prefixes = preprocess.write, list[str](), list[str]()

    def slow(settings: Any, prefix: str) -> Any:
        calls.append(prefix)
        time.sleep(0.5)
        return original(settings, prefix)

    monkeypatch.setattr(preprocess, "write", slow)
    threads = [
        threading.Thread(target=lambda: prefixes.append(prefix_of(plan(model, file))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(prefixes) == 3 and len(set(prefixes)) == 1


@pytest.mark.parametrize("is_hidden", [False, True])
def test_rows_that_change_while_they_are_read_are_refused(
    is_hidden: bool, model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    original = preprocess.write

    def changing(settings: Any, prefix: str) -> Any:
        status, text = file.stat(), file.read_text()
        file.write_text(text.replace("1+1", "1+2") if is_hidden else f"{text}\n", encoding="utf-8")
        if is_hidden:
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return original(settings, prefix)

    monkeypatch.setattr(preprocess, "write", changing)
    with pytest.raises(MsrlError, match=mentions("data.train", file, "changed")):
        prefix_of(plan(model, file))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_refused_with_its_variable(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MSRL_DATA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MsrlError, match=mentions("MSRL_DATA_CACHE", "file")):
        prefix_of(plan(model, write(tmp_path / "rows.jsonl", CHAT)))


def test_errors_about_rows_name_the_rows_and_not_files_of_the_cache(
    model: Path, tmp_path: Path, cache: Path
):
    file = write(tmp_path / "rows.jsonl", CHAT)
    with pytest.raises(MsrlError) as error, prepare_rows(plan(model, file), keep=True) as ready:
        raise MsrlError(f"data prefix {ready.prefix(str(file))}: too long")
    assert str(error.value) == f"{file}: too long"
    empty = write(tmp_path / "empty.jsonl", [])
    empty.write_text("\n\n")
    with pytest.raises(MsrlError, match=mentions("data.train", empty, "no rows")):
        prefix_of(plan(model, empty))


@pytest.mark.parametrize(
    ("rows", "command"),
    [
        pytest.param(PAIRS, "train-sft", id="pairs for train-sft"),
        pytest.param(CHAT, "train-dpo", id="examples for train-dpo"),
        pytest.param(CHAT, "train-rm", id="examples for train-rm"),
        pytest.param(PAIRS, "train-grpo", id="pairs for train-grpo"),
        pytest.param(TEXTS, "train-sft", id="texts for train-sft"),
    ],
)
def test_rows_of_another_kind_than_the_command_reads_are_refused(
    rows: list[Any], command: str, model: Path, tmp_path: Path, cache: Path
):
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(MsrlError, match=mentions(file, "1")):
        prefix_of(plan(model, file, command))


def test_a_blend_mixes_rows_and_preprocessed_data(model: Path, tmp_path: Path):
    from msrl.workflows.sft.setup import example_rows

    first = write(tmp_path / "a.jsonl", CHAT)
    values = {"input": [str(write(tmp_path / "b.jsonl", CHAT[:4]))], "handler": "auto"}
    values |= {"tokenizer": str(model), "template": "native", "output_prefix": str(tmp_path / "b")}
    preprocess.run(Config.model_validate({"preprocess": values}, strict=False))
    blend = {str(first): 0.5, str(tmp_path / "b"): 0.5}
    run = plan(model, first, data={"train": None, "blend": blend, "eval": str(first)})
    with prepare_rows(run, keep=True) as ready:
        rows, held_out = example_rows(ready)
        assert len(rows) == len(CHAT) + 4 and held_out is not None and len(held_out) == len(CHAT)


def test_an_evaluation_reads_rows_with_the_tokenizer_of_its_first_checkpoint(
    model: Path, tmp_path: Path
):
    from msrl.workflows.evaluate.run import prepare

    file = write(tmp_path / "rows.jsonl", CHAT)
    values = {
        "data": {"eval": str(file), "train": str(tmp_path / "gone.jsonl")},
        "evaluate": {"models": [str(model)], "output": str(tmp_path / "out")},
        "reward": {"sources": [{"verifier": "exact_match"}]},
        "eval": {"max_response_tokens": 4},
    }
    config = Config.model_validate(values, strict=False)
    with prepare_rows(resolve(config, "eval"), keep=True) as ready:
        setup = prepare(ready.config)
        assert [prompt.answer for prompt in setup.prompts] == ["x" * i for i in range(1, 7)]
        assert recorded(ready.config)["data"]["eval"] == str(file)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with the preprocessed data `data/rl` and files of rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / "data" / f"rl_packed_input_ids_document.{suffix}").write_bytes(b"")
    (tmp_path / "data" / "rl_answers.jsonl").write_text("{}\n")
    (tmp_path / "data" / "rl_manifest.json").write_text("{}")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", CHAT)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bare").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("data/rl", None),
        ("rows", None),
        ("rows/", None),
        ("rows/a.jsonl", None),
        ("rows/*.jsonl", None),
        ("gone", ("gone_*.idx", "msrl preprocess", "rows")),
        ("data/rll", ("did you mean data/rl?",)),
        ("data/other", ("data/rl",)),
        ("rows/b.jsonl", ("rows/a.jsonl",)),
        ("rl", ("did you mean", "data/rl")),
        ("sft", ("data/rl",)),
        ("empt", ("did you mean", "empty.jsonl")),
        ("rows/x", ("rows/a.jsonl",)),
        ("rows/*.csv", ("no file",)),
        ("data", ("data/rl", "prefix")),
        ("data/rl_answers.jsonl", ("preprocessed", "data/rl")),
        ("data/rl_packed_input_ids_document.bin", ("preprocessed", "data/rl")),
        ("empty.jsonl", ("empty",)),
        ("bare", ("contains no",)),
        ("pipe.jsonl", ("pipe", "not a file")),
        (".", ("contains no",)),
    ],
)
def test_a_name_is_data_or_rows_or_has_one_message_with_the_remedy(
    name: str, fragments: tuple[str, ...] | None, layout: Path
):
    if name == ".":
        (layout / "rows" / "a.jsonl").unlink()
        (layout / "empty.jsonl").unlink()
        for file in (layout / "data").iterdir():
            file.unlink()
    problem = location.mistake(name)
    if fragments is None:
        assert problem is None
        assert location.names_rows(name) == name.startswith("rows")
    else:
        assert_mentions(problem, *fragments)


def test_a_name_of_both_data_and_rows_is_refused(layout: Path):
    write(layout / "data" / "rl", CHAT)
    assert_mentions(location.mistake("data/rl"), "both", "file")
    (layout / "data" / "rl").unlink()
    (layout / "data" / "rl").mkdir()
    assert location.mistake("data/rl") is None  # the folder has no rows
    write(layout / "data" / "rl" / "a.jsonl", CHAT)
    assert_mentions(location.mistake("data/rl"), "both", "data/rl/")
    assert location.mistake("data/rl/") is None and location.names_rows("data/rl/")
    for split in ("train", "test"):
        (layout / "data" / "rl" / split).mkdir()
        (layout / "data" / "rl" / "a.jsonl").rename(layout / "data" / "rl" / split / "a.jsonl")
        write(layout / "data" / "rl" / "a.jsonl", CHAT)
    (layout / "data" / "rl" / "a.jsonl").unlink()
    assert_mentions(location.mistake("data/rl"), "both", "data/rl/")


def test_a_dry_run_of_rows_starts_nothing_and_shows_an_example(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    from msrl.cli import app

    file = write(tmp_path / "rows.jsonl", CHAT)
    monkeypatch.chdir(tmp_path)
    arguments = ["train-sft", "--model", str(model), "--data", str(file), "--steps", "1"]
    arguments += ["--platform", "cpu", "--set", "train.global_batch=2", "--dry-run"]
    result = CliRunner().invoke(app.app, arguments)
    assert result.exit_code == 0, result.output
    assert_mentions(result.output, f"{file}, row 1:", "trained, 2 tokens", "| x<|im_end|>")
    assert not cache.exists() and not (tmp_path / "runs").exists()
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def test_bad_rows_of_a_run_are_in_its_entry_and_the_split_of_a_folder_is_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for split, rows in (("train", [{"messages": 5}, *CHAT]), ("test", CHAT[:2])):
        (tmp_path / "rows" / split).mkdir(parents=True)
        write(tmp_path / "rows" / split / "a.jsonl", rows)
    assert_mentions(location.mistake(str(tmp_path / "rows")), "train", "test")
    settings = {"on_bad_row": "drop", "split": "train"}
    assert location.mistake(str(tmp_path / "rows"), "train") is None
    run = plan(model, tmp_path / "rows", preprocess=settings)
    prefix_of(run, keep=False)
    assert "bad_rows.jsonl" not in capsys.readouterr().err
    prefix = prefix_of(run)
    shown = capsys.readouterr().err
    assert f"{prefix}_bad_rows.jsonl" in shown
    assert Path(f"{prefix}_bad_rows.jsonl").read_text().count("\n") == 1
