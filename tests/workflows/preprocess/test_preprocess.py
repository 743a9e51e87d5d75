"""msrl preprocess from files to datasets: real inputs, drop counts, packing, workers, messages."""

from __future__ import annotations

import atexit
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest

from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset, SftDataset, TextDataset
from msrl.data.files.readers import find_files, read_batches
from msrl.data.manifest import incomplete_path, manifest_path, read_manifest
from msrl.data.render import make_renderer
from msrl.data.template_date import with_fixed_day
from msrl.data.templates.files import load_template
from msrl.data.tokenize import tokenize_rows
from msrl.data.tokenizer import load_tokenizer, open_tokenizer, tokenizer_hash
from msrl.errors import MsrlError
from msrl.types import Conversation, Message
from msrl.workflows.engine import choose_renderer
from msrl.workflows.preprocess import make_job, needs_processes, run, tokenize_all
from published_tokenizers import published_tokenizer
from support import HANG_S, assert_mentions, mentions, shared_data, wait_until
from tiny_qwen2 import make_tokenizer
from training_runs import Command, children


@cache
def byte_tokenizer() -> str:
    """Return a folder with a tokenizer of bytes, which opens faster than a published one."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    make_tokenizer().save_pretrained(folder)
    return folder


QWEN = "qwen2.5-0.5b-instruct"


def preprocess(prefix, **settings):
    settings = {
        "tokenizer": byte_tokenizer(),
        "template": "qwen",
        **settings,
    }
    present = {key: value for key, value in settings.items() if value is not None}
    return run(Config.model_validate({"preprocess": {"output_prefix": str(prefix), **present}}))


def preprocess_published(prefix, **settings):
    """Preprocess with a published tokenizer."""
    return preprocess(prefix, tokenizer=str(shared_data("tokenizers", QWEN)), **settings)


def jsonl(path, rows) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def gsm8k(number: int = 200) -> list[dict]:
    with shared_data("math", "gsm8k_train.jsonl").open() as file:
        return [json.loads(line) for _, line in zip(range(number), file, strict=False)]


@cache
def qwen():
    return open_tokenizer(shared_data("tokenizers", QWEN))


def render(row: dict):
    """Return a GSM8K row as rendered by the renderer."""
    turns = (Message("user", row["question"]), Message("assistant", row["answer"]))
    return make_renderer(load_template("qwen"), qwen()).examples([Conversation(turns)])[0]


def same(a, b) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_mask, b.loss_mask)


@pytest.mark.slow
def test_gsm8k_is_converted_to_examples_in_file_order(tmp_path):
    rows = gsm8k()
    manifest = preprocess_published(
        tmp_path / "g",
        input=jsonl(tmp_path / "g.jsonl", rows),
        handler="gsm8k",
        kind="sft",
        seq_length=1024,
    )
    data = SftDataset(tmp_path / "g")
    assert (
        data.manifest == manifest
        and len(data) == manifest.num_examples == len(rows)
        and manifest.dropped == {}
    )
    expected = [render(row) for row in rows]
    assert all(
        len(row) == 1 and same(row[0], example) for row, example in zip(data, expected, strict=True)
    )
    assert manifest.num_tokens == sum(len(e.token_ids) for e in expected)
    assert manifest.num_loss_tokens == sum(int(e.loss_mask.sum()) for e in expected)
    assert manifest.max_tokens == max(len(e.token_ids) for e in expected)
    assert (
        manifest.tokenizer_hash == tokenizer_hash(qwen())
        and manifest.vocab_size == 151665
        and manifest.stop_token_ids == (151645,)
    )


@pytest.mark.slow
def test_gsm8k_is_converted_to_prompts_that_mindspeed_can_read(tmp_path):
    rows = gsm8k()
    inputs = jsonl(tmp_path / "g.jsonl", rows)
    keys = {"extra.source": "question"}
    manifest = preprocess_published(
        tmp_path / "g",
        input=inputs,
        handler="gsm8k",
        template="qwen_r1",
        seq_length=512,
        map_keys=keys,
    )
    assert manifest.kind == "prompts"
    data = PromptDataset(tmp_path / "g")
    hf = published_tokenizer(QWEN)
    renderer = make_renderer(load_template("qwen_r1"), qwen())
    for number, (row, prompt) in enumerate(zip(rows, data, strict=True)):
        assert prompt.index == number and prompt.answer == row["answer"].split("#### ")[1].replace(
            ",", ""
        )
        assert prompt.extra == {"source": row["question"]}
        assert (
            prompt.token_ids.tolist()
            == renderer.prompt(Conversation((Message("user", row["question"]),))).tolist()
        )
    (tmp_path / "g_answers.jsonl").unlink()
    decoded = PromptDataset(tmp_path / "g", decode=lambda ids: str(hf.decode(ids)))
    assert [decoded[i].answer for i in range(5)] == ["72", "10", "5", "42", "624"]


@pytest.mark.full
def test_the_complete_gsm8k_is_preprocessed_with_two_workers(tmp_path):
    source = [str(shared_data("math", "gsm8k_train.jsonl"))]
    assert (
        preprocess_published(
            tmp_path / "p", input=source, handler="gsm8k", template="qwen_r1", workers=2
        ).num_examples
        == 7473
    )
    packed = preprocess_published(
        tmp_path / "s",
        input=source,
        handler="gsm8k",
        kind="sft",
        seq_length=512,
        pack=True,
        workers=2,
    )
    assert packed.num_examples + packed.dropped.get("too_long", 0) == 7473
    assert packed.num_tokens / (packed.num_rows * 512) > 0.96


@pytest.mark.slow
def test_packed_rows_contain_every_example_once_with_its_boundaries(tmp_path):
    rows = gsm8k()
    inputs = jsonl(tmp_path / "g.jsonl", rows)
    manifest = preprocess_published(
        tmp_path / "g", input=inputs, handler="gsm8k", kind="sft", seq_length=512, pack=True
    )
    data = SftDataset(tmp_path / "g")
    examples = [example for row in data for example in row]
    assert len(data) == manifest.num_rows < len(examples) == manifest.num_examples == len(rows)
    key = lambda e: e.token_ids.tolist()  # noqa: E731
    assert all(
        same(a, b)
        for a, b in zip(sorted(examples, key=key), sorted(map(render, rows), key=key), strict=True)
    )
    raw = np.fromfile(tmp_path / "g_packed_attention_mask_document.bin", np.int32).reshape(-1, 512)
    assert all((np.diff(row[row > 0]) >= 0).all() and row[0] == 1 for row in raw)


@pytest.mark.slow
def test_megatron_reads_preprocessed_files(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    preprocess(
        tmp_path / "g", input=jsonl(tmp_path / "g.jsonl", gsm8k(20)), handler="gsm8k", kind="sft"
    )
    ours = SftDataset(tmp_path / "g")
    ids = IndexedDataset(str(tmp_path / "g_packed_input_ids_document"))
    labels = IndexedDataset(str(tmp_path / "g_packed_labels_document"))
    for number in range(20):
        example = ours[number][0]
        assert ids[number].tolist() == example.token_ids.tolist()
        assert (
            labels[number].tolist() == np.where(example.loss_mask, example.token_ids, -100).tolist()
        )


@pytest.mark.slow
@pytest.mark.parametrize("pack", [pytest.param(False, marks=pytest.mark.full), True])
def test_files_are_identical_for_any_number_of_workers(tmp_path, pack):
    inputs = jsonl(tmp_path / "g.jsonl", gsm8k(1500))
    for workers in (1, 2):
        preprocess(
            tmp_path / f"w{workers}" / "g",
            input=inputs,
            handler="gsm8k",
            kind="sft",
            seq_length=512,
            pack=pack,
            workers=workers,
        )
    first, second = (sorted((tmp_path / f"w{n}").iterdir()) for n in (1, 2))
    assert [p.name for p in first] == [p.name for p in second] and len(first) == 7
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


@pytest.mark.full
@pytest.mark.slow
def test_real_alpaca_and_tool_conversations_are_preprocessed(tmp_path):
    alpaca = [
        str(shared_data("sft", "alpaca_en_demo.json")),
        str(shared_data("sft", "alpaca_zh_demo.json")),
    ]
    manifest = preprocess_published(
        tmp_path / "a", input=alpaca, handler="alpaca", template="qwen3", seq_length=4096
    )
    assert manifest.num_examples + sum(manifest.dropped.values()) == 1999
    tools = [str(shared_data("sft", "glaive_toolcall_en_demo.json"))]
    assert (
        preprocess_published(
            tmp_path / "t", input=tools, handler="sharegpt", template="native"
        ).num_examples
        == 300
    )


@pytest.mark.slow
def test_pretraining_text_has_the_tokenizers_ids_and_the_end_of_document(tmp_path):
    source = shared_data("sft", "c4_demo.jsonl")
    manifest = preprocess_published(
        tmp_path / "c", input=[str(source)], handler="pretrain", template=None, append_eod=True
    )
    hf = published_tokenizer(QWEN)
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    data = TextDataset(tmp_path / "c")
    assert (tmp_path / "c_text_document.bin").exists() and len(data) == manifest.num_rows == len(
        texts
    )
    assert all(
        data[i].tolist() == [*hf(texts[i])["input_ids"], hf.eos_token_id] for i in range(0, 300, 17)
    )


def test_dropped_rows_are_counted_by_reason(tmp_path):
    good = {"instruction": "Hi", "output": "Hello"}
    long = {"instruction": "Hi", "output": "word " * 100}
    inputs = jsonl(
        tmp_path / "x.jsonl",
        [
            good,
            long,
            {"instruction": " ", "output": "x"},
            {"instruction": "Hi", "output": ""},
            good,
        ],
    )
    manifest = preprocess_published(tmp_path / "x", input=inputs, handler="alpaca", seq_length=64)
    assert manifest.num_examples == 2 and manifest.dropped == {
        "empty_answer": 1,
        "empty_prompt": 1,
        "too_long": 1,
    }
    assert json.loads(manifest_path(str(tmp_path / "x")).read_text())["dropped"] == manifest.dropped


@pytest.mark.slow
def test_examples_longer_than_seq_length_are_dropped_or_truncated(tmp_path):
    row = {"instruction": "Hi", "output": "one two three four five"}
    inputs = jsonl(tmp_path / "x.jsonl", [row])
    length = preprocess(tmp_path / "x", input=inputs, handler="alpaca").max_tokens
    assert (
        preprocess(tmp_path / "y", input=inputs, handler="alpaca", seq_length=length).num_examples
        == 1
    )
    shortened = preprocess(
        tmp_path / "z", input=inputs, handler="alpaca", seq_length=length - 3, too_long="truncate"
    )
    assert (shortened.truncated, shortened.num_tokens, shortened.dropped) == (1, length - 3, {})
    full, short = SftDataset(tmp_path / "x")[0][0], SftDataset(tmp_path / "z")[0][0]
    assert short.token_ids.tolist() == full.token_ids[:-3].tolist()


def test_alpaca_as_prompts_keeps_the_response_as_the_answer(tmp_path):
    inputs = jsonl(tmp_path / "x.jsonl", [{"instruction": "2+2?", "output": '4\n"four" é'}])
    preprocess(tmp_path / "x", input=inputs, handler="alpaca", kind="prompts")
    assert PromptDataset(tmp_path / "x")[0].answer == '4\n"four" é'


@pytest.mark.slow
def test_existing_data_is_replaced_completely_and_only_with_overwrite(tmp_path):
    inputs = jsonl(tmp_path / "x.jsonl", gsm8k(3))
    preprocess(tmp_path / "x", input=inputs, handler="gsm8k")
    with pytest.raises(MsrlError, match=mentions(tmp_path / "x", "--overwrite")):
        preprocess(tmp_path / "x", input=inputs, handler="gsm8k", kind="sft")
    preprocess(tmp_path / "x", input=inputs, handler="gsm8k", kind="sft", overwrite=True)
    assert not (tmp_path / "x_answers.jsonl").exists() and len(SftDataset(tmp_path / "x")) == 3


@pytest.mark.slow
def test_a_failure_keeps_the_old_data_and_leaves_no_temporary_files(tmp_path):
    preprocess(tmp_path / "x", input=jsonl(tmp_path / "x.jsonl", gsm8k(3)), handler="gsm8k")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    (tmp_path / "x.jsonl").write_text(
        (tmp_path / "x.jsonl").read_text() + '{"question": 1, "answer": "#### 1"}\n'
    )
    with pytest.raises(MsrlError, match=mentions("x.jsonl:4", "'question'", "number")):
        preprocess(
            tmp_path / "x", input=[str(tmp_path / "x.jsonl")], handler="gsm8k", overwrite=True
        )
    assert {
        p.name: p.read_bytes()
        for p in tmp_path.iterdir()
        if p.suffix != ".jsonl" or "answers" in p.name
    } == {name: content for name, content in before.items() if name != "x.jsonl"}


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    inputs = jsonl(tmp_path / "x.jsonl", gsm8k(3))
    free = 100
    write = Path.open

    class FullFile(io.BytesIO):
        def write(self, data):
            if len(data) > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

        def close(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_file(path, mode="r", *args, **options):
        full = mode == "wb" and path.suffix == ".bin"
        return FullFile() if full else write(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_file)
    with pytest.raises(MsrlError, match=mentions("preprocess.output_prefix", "space")):
        preprocess(tmp_path / "out" / "g", input=inputs, handler="gsm8k")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_file_size_limit_is_one_message_and_leaves_nothing(tmp_path):
    inputs = jsonl(tmp_path / "x.jsonl", gsm8k(200))
    tokenizer = shared_data("tokenizers", "qwen2.5-0.5b-instruct")
    command = (
        "trap '' XFSZ; ulimit -f 8; exec "
        f"{sys.executable} -B -m msrl preprocess --input {inputs[0]} --handler gsm8k "
        f"--template qwen --tokenizer {tokenizer} --output-prefix {tmp_path / 'out' / 'g'}"
    )
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert_mentions(ended.stderr, "preprocess.output_prefix", "large")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_the_files_of_a_killed_run_are_removed_by_the_next_one(tmp_path):
    inputs = jsonl(tmp_path / "x.jsonl", gsm8k(3))
    many = jsonl(tmp_path / "many.jsonl", gsm8k(1) * 100_000)
    tokenizer = str(shared_data("tokenizers", QWEN))
    arguments = ["--handler", "gsm8k", "--template", "qwen", "--tokenizer", tokenizer]
    paths = ["--input", many[0], "--output-prefix", str(tmp_path / "out" / "g")]
    killed = subprocess.Popen([sys.executable, "-m", "msrl", "preprocess", *arguments, *paths])
    wait_until(lambda: list((tmp_path / "out").glob("msrl-*/*.bin")))
    killed.kill()
    killed.wait()
    assert list((tmp_path / "out").glob("msrl-*/owner.json"))
    preprocess(tmp_path / "out" / "h", input=inputs, handler="gsm8k")
    assert {path.name[:2] for path in (tmp_path / "out").iterdir()} == {"h_"}


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_command_with_one_message_and_leaves_nothing(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os\n\n\ndef conversation(row):\n    os.kill(os.getpid(), 9)\n"
    )
    with pytest.raises(MsrlError, match=mentions("killed", "memory", "preprocess.workers")):
        preprocess(
            tmp_path / "out" / "x",
            input=jsonl(tmp_path / "x.jsonl", gsm8k(3)),
            handler=f"{tmp_path / 'own.py'}:conversation",
            workers=2,
        )
    assert list((tmp_path / "out").iterdir()) == []


def test_preference_data_is_refused_and_nothing_is_written(tmp_path):
    for name, word in (("kto_en_demo.json", "KTO"), ("dpo_en_demo.json", "DPO")):
        with pytest.raises(MsrlError, match=mentions(name, word)):
            preprocess(
                tmp_path / "out" / "x", input=[str(shared_data("sft", name))], handler="sharegpt"
            )
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_prompts_without_a_ground_truth_are_written_and_counted(tmp_path):
    rows = [{"instruction": "a"}, {"instruction": "b"}]
    manifest = preprocess(
        tmp_path / "x",
        input=jsonl(tmp_path / "x.jsonl", rows),
        handler="r1",
        map_keys={"response": ""},
    )
    assert (manifest.num_examples, manifest.num_without_answer) == (2, 2)
    assert [prompt.answer for prompt in PromptDataset(tmp_path / "x")] == ["", ""]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "threads", "size", "expected"),
    [
        ({}, "true", 30 << 20, False),
        ({}, "true", 130 << 20, True),
        ({}, "false", 1, True),
        ({"template": "native"}, "true", 1, True),
        ({"workers": 1}, "true", 1 << 40, False),
    ],
)
def test_processes_start_only_where_they_are_faster(
    tmp_path, monkeypatch, settings, threads, size, expected
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    file = tmp_path / "x.jsonl"
    with file.open("wb") as empty:
        empty.truncate(min(size, 1 << 32))
    tokenizer = str(shared_data("tokenizers", QWEN))
    values = {"handler": "alpaca", "template": "qwen", "tokenizer": tokenizer, "workers": 2}
    section = Config.model_validate({"preprocess": {**values, **settings}}).preprocess
    assert needs_processes(make_job(section), (file,), section.workers) == expected


def test_incomplete_data_is_refused(tmp_path):
    preprocess(tmp_path / "x", input=jsonl(tmp_path / "x.jsonl", gsm8k(3)), handler="gsm8k")
    incomplete_path(str(tmp_path / "x")).touch()
    with pytest.raises(MsrlError, match=mentions(tmp_path / "x", "--overwrite")):
        PromptDataset(tmp_path / "x")


@pytest.mark.slow
def test_an_error_in_a_worker_process_contains_file_and_row(tmp_path):
    rows = [*gsm8k(600), {"question": "x", "answer": "none"}]
    with pytest.raises(MsrlError, match=r"g\.jsonl:601: column 'answer'"):
        preprocess(
            tmp_path / "g", input=jsonl(tmp_path / "g.jsonl", rows), handler="gsm8k", workers=2
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.jsonl"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"handler": "gsm9k"}, ("gsm9k", "'gsm8k'")),
        ({"template": "qwen_r2"}, ("qwen_r2", "'qwen_r1'")),
        ({"template": None}, ("preprocess.template", "set")),
        ({"tokenizer": "/nowhere"}, ("tokenizer=/nowhere", "folder")),
        ({"tokenizer": "/usr"}, ("tokenizer=/usr", "tokenizer.json")),
        ({"input": ["/nowhere.jsonl"]}, ("preprocess.input=/nowhere.jsonl", "file")),
        ({"handler": "alpaca"}, ("g.jsonl:1", "'instruction'")),
        ({"pack": True, "seq_length": 64}, ("preprocess.pack=True", "prompts")),
        ({"kind": "sft", "pack": True}, ("preprocess.pack", "length")),
        ({"kind": "sft", "too_long": "truncate"}, ("preprocess.too_long", "seq_length")),
        ({"handler": "pretrain"}, ("preprocess.template=qwen", "pretrain")),
        ({"seq_length": 2}, ("3 (too long)",)),
        ({"enable_thinking": False}, ("template qwen", "thoughts")),
    ],
)
def test_an_error_is_one_message_and_nothing_is_written(tmp_path, settings, fragments):
    inputs = jsonl(tmp_path / "g.jsonl", gsm8k(3))
    with pytest.raises(MsrlError) as caught:
        preprocess(tmp_path / "out" / "g", **{"input": inputs, "handler": "gsm8k", **settings})
    assert_mentions(caught.value, *fragments)
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_empty_dataset_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n\n")
    with pytest.raises(MsrlError, match=mentions("no rows")):
        preprocess(tmp_path / "x", input=[str(tmp_path / "x.jsonl")], handler="gsm8k")


def test_tools_that_the_template_cannot_show_raise_an_error_with_the_row(tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    inputs = jsonl(
        tmp_path / "x.jsonl",
        [{"conversations": turns}, {"conversations": turns, "tools": '[{"name": "f"}]'}],
    )
    with pytest.raises(MsrlError, match=mentions("x.jsonl:2", "qwen_plain", "tools")):
        own = tmp_path / "qwen_plain.yaml"
        own.write_text('user: "{{content}}"\nassistant: "{{content}}{{eos}}"\n')
        preprocess(tmp_path / "x", input=inputs, handler="sharegpt", template=str(own))


@pytest.mark.parametrize("column", ["instruction", "output", "note"])
def test_an_unpaired_surrogate_raises_an_error_with_its_row(tmp_path, column):
    row = {"instruction": "2+2?", "output": "4", "note": "x"}
    files = jsonl(tmp_path / "in.jsonl", [row, {**row, column: "shortened \ud83d"}])
    with pytest.raises(MsrlError, match=mentions("in.jsonl:2", "\\ud83d", "character")):
        preprocess(tmp_path / "out", input=files, handler="r1", map_keys={"extra.note": "note"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.full)],
)
def test_a_terminated_run_leaves_no_workers_and_after_sigterm_no_files(tmp_path, number, code):
    files = jsonl(
        tmp_path / "in.jsonl",
        [{"instruction": "question " * 20, "output": "answer " * 50}] * 100_000,
    )
    tokenizer = str(shared_data("tokenizers", QWEN))
    flags = [
        "--input",
        *files,
        "--tokenizer",
        tokenizer,
        "--template",
        "qwen",
        "--handler",
        "alpaca",
        "--workers",
        "2",
    ]
    flags += ["--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-c", "from msrl.cli.app import main; main()", "preprocess", *flags]
    ) as process:
        deadline = time.monotonic() + HANG_S
        while not any(path.stat().st_size for path in tmp_path.glob("msrl-preprocess-*/*.bin")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == code
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    if number == signal.SIGTERM:
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_ctrl_c_while_workers_start_prints_one_word(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    inputs = jsonl(tmp_path / "g.jsonl", [{"instruction": "x" * 200, "output": "y"}] * 20_000)
    flags = [
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--handler",
        "alpaca",
        "--template",
        "qwen",
        "--workers",
        "4",
    ]
    prefix = str(tmp_path / "out" / "g")
    command = Command(
        "preprocess", "--input", *inputs, *flags, "--output-prefix", prefix, log=tmp_path / "log"
    )
    command.when(
        lambda: any("spawn_main" in line for line in children(command.process.pid).values())
    )
    time.sleep(0.5)  # they are importing
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 130
    assert "Traceback" not in command.output() and "interrupted" in command.output()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_threads_write_the_rows_of_one_thread_with_control_tokens_as_text(tmp_path):
    rows = [
        {"instruction": f"{i} <|im_end|> {'x ' * (i % 7)}" if i % 3 else f"{i}", "output": f"{i}!"}
        for i in range(2000)
    ]
    inputs = jsonl(tmp_path / "x.jsonl", rows)
    tokenizer = str(shared_data("tokenizers", QWEN))
    values = {"input": inputs, "handler": "alpaca", "template": "qwen", "tokenizer": tokenizer}
    job = make_job(Config.model_validate({"preprocess": values}).preprocess)
    batches = list(read_batches(find_files(inputs)))
    expected = [tokenize_rows(job, batch) for batch in batches]
    results = list(tokenize_all(job, batches, 1))
    assert len(results) == len(batches) > 2
    for result, rows_of_one in zip(results, expected, strict=True):
        assert np.array_equal(result.sequences.values, rows_of_one.sequences.values)
        assert np.array_equal(result.loss_mask, rows_of_one.loss_mask)


@pytest.mark.full
@pytest.mark.slow
def test_a_chat_template_that_writes_the_date_is_reported(tmp_path, capsys):
    folder = tmp_path / "tokenizer"
    shutil.copytree(shared_data("tokenizers", "qwen2.5-0.5b-instruct"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('%d %b %Y') }}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    inputs = jsonl(tmp_path / "g.jsonl", gsm8k(2))
    keys = {"input": inputs, "handler": "gsm8k", "kind": "sft", "template": "native"}
    keys |= {"tokenizer": str(folder)}
    preprocess(tmp_path / "g", **keys)
    assert "the current date" in capsys.readouterr().out
    days = [date.today().isoformat(), "2024-07-26"]
    preprocess(tmp_path / "fixed", date=days[1], **keys)
    assert_mentions(capsys.readouterr().out, "writes the date 2024-07-26")
    manifests = [read_manifest(str(tmp_path / name)) for name in ("g", "fixed")]
    assert [manifest.date for manifest in manifests] == days
    # The manifest has the template of the data, which rollouts, exports and servers use.
    assert [manifest.chat_template[:17] for manifest in manifests] == ["", '{{ "26 Jul 2024" ']
    tokenizer = load_tokenizer(folder)
    [question] = [row["question"] for row in gsm8k(1)]
    rows = SftDataset(str(tmp_path / "fixed"))
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        chat_template=manifests[1].chat_template,
        tokenize=True,
        return_dict=False,
    )
    assert rows[0][0].token_ids[: len(start)].tolist() == start
    assert tokenizer.decode(start).startswith("26 Jul 2024")
    prompt = choose_renderer(folder, None, day=days[1]).prompt(
        Conversation((Message("user", question),))
    )
    assert prompt[: len(start)].tolist() == start


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "qwen", "date": "2024-07-26"}, ("no effect", "qwen")),
        ({"template": "native", "date": "2024-07-26"}, ("no effect", "native")),
    ],
)
def test_a_date_that_no_template_writes_is_refused(tmp_path, settings, words):
    keys = {
        "input": jsonl(tmp_path / "g.jsonl", gsm8k(2)),
        "handler": "gsm8k",
        "tokenizer": str(shared_data("tokenizers", "qwen2.5-0.5b-instruct")),
    }
    with pytest.raises(MsrlError, match=mentions(*words)):
        preprocess(tmp_path / "g", **keys, **settings)


def test_a_template_that_computes_the_format_of_its_date_cannot_be_fixed():
    assert with_fixed_day(
        "{{ strftime_now('%Y') }} {{ strftime_now is defined }}", "2024-07-26"
    ) == ('{{ "2024" }} {{ strftime_now is defined }}')
    with pytest.raises(MsrlError, match=mentions("2024-07-26", "format")):
        with_fixed_day("{% set f = '%Y' %}{{ strftime_now(f) }}", "2024-07-26")


@pytest.mark.parametrize("name", ["levle", "question"])
def test_a_column_to_keep_that_no_row_has_is_refused(tmp_path, name):
    rows = [{"question": "a", "answer": "4", "level": 3}, {"question": "b", "answer": "5"}]
    settings = {"input": jsonl(tmp_path / "x.jsonl", rows), "handler": "auto", "kind": "prompts"}
    with pytest.raises(MsrlError, match=mentions("preprocess.keep", name)):
        preprocess(tmp_path / "out" / "x", keep=["level", name], **settings)
    assert not list((tmp_path / "out").iterdir())
    assert preprocess(tmp_path / "out" / "x", keep=["level"], **settings).num_examples == 2
