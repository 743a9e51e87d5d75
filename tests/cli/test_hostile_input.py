"""Input of hostile size or nesting: one message and exit code 2, without hang or traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from msrl.chat_rendering import client as chat_rendering
from msrl.checkpoint.adapters.peft import read_peft
from msrl.checkpoint.hf.manifest import HF_MANIFEST, hf_manifest_files
from msrl.checkpoint.hf.weight_files import open_weight_files
from msrl.checkpoint.integrity import FileCheck, hf_checks, weight_checks
from msrl.checkpoint.mcore.files import read_manifest as read_mcore_manifest
from msrl.checkpoint.mcore.locate import latest_iteration
from msrl.cli.configuration import load_configuration as load
from msrl.config import sources
from msrl.data.files.readers import find_files
from msrl.data.manifest import read_manifest
from msrl.data.native import native_examples, native_prompts
from msrl.data.spans import encode_texts
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.files import MAX_JSON_BYTES
from msrl.limits import MIN_OPEN_FILES, TimeLimitError, printable, run_within, whole_number
from msrl.models.hf_config import end_tokens, read_hf_config
from msrl.models.paths import TRACKER
from msrl.processes import limited
from msrl.rewards.models.worker import text_ids
from msrl.rollout.episodes.template import open_template
from msrl.rollout.vllm_server import limit_templates
from msrl.tracking.metrics import read_metrics
from msrl.types import Conversation, Message
from msrl.workflows.view.recorded import recorded_values
from support import assert_mentions, mentions
from test_cli import msrl
from tiny_qwen2 import make_tokenizer, save_model

QUESTION = Conversation((Message("user", "2+2?"), Message("assistant", "4")))


def test_infinite_counts_in_files_are_reported(tmp_path: Path) -> None:
    """JSON numbers such as 1e999 are infinite, which `int` does not convert."""
    metrics, manifest = tmp_path / "metrics.jsonl", tmp_path / HF_MANIFEST
    metrics.write_text('{"step": 1e999, "metrics": {}}\n')
    with pytest.raises(MsrlError, match=mentions("metrics.jsonl:1", "infinity")):
        read_metrics(tmp_path)
    record = '{"bytes": Infinity, "crc32": "0"}'
    manifest.write_text(f'{{"format": 1, "kind": "huggingface", "files": {{"a": {record}}}}}')
    with pytest.raises(MsrlError, match=mentions(HF_MANIFEST, "infinity")):
        hf_manifest_files(tmp_path)


@pytest.mark.parametrize("text", ["9" * 6000, "²", "-1", "", "1.0", " 1"])
def test_texts_that_are_no_usable_number_have_none(text: str) -> None:
    assert whole_number(text) is None
    assert whole_number("0") == 0 and whole_number("007") == 7


@pytest.mark.parametrize("word", ["9" * 6000, "²"], ids=["digits", "superscript"])
def test_digits_in_keys_and_lists_are_one_message(word: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text, key in (
        (f'run: {{name: "${{data.train.{word}}}"}}\ndata: {{train: [a, b]}}', "data.train"),
        (f'train: {{parallel: {{num_layer_list: "1,{word}"}}}}', "num_layer_list"),
        (f"cluster: {{ports: {word}-{word}}}", "cluster.ports"),
    ):
        file.write_text(text)
        with pytest.raises(MsrlError) as caught:
            load([str(file)], command="train-sft")
        assert_mentions(str(caught.value), key)


RECORD_FILES: list[tuple[str, Callable[[Path], object]]] = [
    (TRACKER, latest_iteration),
    (HF_MANIFEST, read_mcore_manifest),
    (HF_MANIFEST, hf_manifest_files),
    ("model.safetensors.index.json", open_weight_files),
    ("pytorch_model.bin.index.json", open_weight_files),
    ("model.safetensors.index.json", hf_checks),
    ("generation_config.json", end_tokens),
    ("config.json", read_hf_config),
    ("config.yaml", lambda folder: recorded_values(folder / "config.yaml")),
    ("data_manifest.json", lambda folder: read_manifest(str(folder / "data"))),
    ("dataset_dict.json", lambda folder: find_files([str(folder)])),
    ("adapter_config.json", read_peft),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "read"), RECORD_FILES)
def test_a_file_of_records_is_not_read_beyond_its_limit(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """A file with a hole needs no space on a disk, and a pipe has no end."""
    file = tmp_path / name
    file.touch()
    os.truncate(file, MAX_JSON_BYTES + 1)
    with pytest.raises(MsrlError, match=mentions(file, "larger", "MiB")):
        read(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with contextlib.suppress(MsrlError):  # or it counts as absent
        run_within(60, lambda: read(tmp_path))


def lists(levels: int) -> str:
    """Return YAML whose aliases expand to 10 ** levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines)


def references(form: str, levels: int) -> str:
    """Return YAML in which each of `levels` values refers to the one before it."""
    lines = ["k0: [ab]" if form.startswith("[") else "k0: ab"]
    for level in range(1, levels):
        previous = form.replace("%d", str(level - 1))
        lines.append(f"k{level}: {previous}")
    return "\n".join(lines)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        (lists(9), "aliases"),
        ("run: " + "[" * 5000 + "]" * 5000, "nested"),
        ("run: " + "{a: " * 5000 + "1" + "}" * 5000, "nested"),
        ("a: 1\nrun: " + "[" * 1_000_000, "a.yaml:2"),
        ("".join(" " * i + "a:\n" for i in range(1000)), "a.yaml:100"),
        ("%YAML " + "1" * 5000 + ".1\n--- a", "YAML"),
        (references("${k%d}${k%d}", 40), "insert"),
        (references('["${k%d}", "${k%d}"]', 40), "insert"),
        (references("${k%d}", 2000), "levels"),
        ("run:\n  name: " + "${k0}" * 1000 + "\nk0: " + "x" * 100_000, "insert"),
        ("# " + "x" * 50_000_000, "MiB"),
        ("train: {steps: " + "9" * 6000 + "}", "train.steps"),
        ("train: {steps: 0x" + "f" * 6000 + "}", "train.steps"),
        ("train: {optimizer: {lr: " + "9" * 6000 + "}}", "train.optimizer.lr"),
        ("train: {steps: 1" + "0" * 250 + "}", ""),
        ('run: {name: "\\e[2Jx", nmae: 1}', "run.nmae"),
        ("run:\n" + "".join(f" x{n}: 1\n" for n in range(3000)), "more"),
        ("run:\n" + "".join(f" x{n}: ${{a.b}}\n" for n in range(3000)), "more"),
        ("run: {name: x\n" + ", name: x\n" * 3000 + "}", "more"),
        ("run: {name: '${" + "a" * 100_000 + "}'}", "run.name"),
        ("run: {" + "a" * 1_000 + ": 1}\n" + "b" * 1000 + ": 1", "run.aaa"),
        ("run: {name: [" + "!!set x,\n" * 3000 + "]}", "more"),
    ],
    ids=[
        "aliases",
        "lists",
        "mappings",
        "brackets",
        "indents",
        "version",
        "doubled",
        "doubled lists",
        "chain",
        "repeated",
        "comment",
        "digits",
        "hex",
        "float",
        "250 digits",
        "escape",
        "unknown keys",
        "unknown references",
        "repeated key",
        "long reference",
        "long key",
        "tags",
    ],
)
def test_a_hostile_configuration_is_one_message(
    text: str,
    keyword: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    start = time.process_time()
    assert msrl("train-sft", "-c", "a.yaml", "--dry-run") == 2
    assert time.process_time() - start < 30
    error = capfd.readouterr().err
    assert keyword in error
    assert len(error) < (20_000 if keyword == "more" else 5000)
    assert "Traceback" not in error


def test_a_configuration_may_have_a_hundred_levels():
    sources.parse("run: " + "[" * 98 + "]" * 98, "a.yaml")
    with pytest.raises(MsrlError, match=mentions("a.yaml:1", "nested", "100")):
        sources.parse("run: " + "[" * 100 + "]" * 100, "a.yaml")


def test_a_configuration_is_not_read_beyond_its_limit_of_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_MAX_NODES", 100)
    with pytest.raises(MsrlError, match=mentions("a.yaml", "values")):
        sources.parse("run: [" + "1," * 200 + "]]]", "a.yaml")  # the end is not valid


_PROGRAM = "python pretrain_gpt.py --num-layers 2\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        (f"x={'a' * 60}\nif [[ $x =~ ^(a+)+b$ ]]; then y=1; fi\n{_PROGRAM}", "longer"),
        ("x=1\n" * 300_000 + _PROGRAM, "longer"),
        ("x=" + "a" * 5_000_000 + "\n" + _PROGRAM, "MiB"),
        ("x=aaaaaaaa\n" + "x=$x$x\n" * 16 + "y=${x//a/$x}\n" + _PROGRAM, "memory"),
        (
            "a0=1\n"
            + "".join(f"a{n}='a{n - 1}+a{n - 1}'\n" for n in range(1, 40))
            + "echo $((a39))\n"
            + _PROGRAM,
            "longer",
        ),
        ("python pretrain_gpt.py" + "".join(f" --x{n} 1" for n in range(20_000)), "longer"),
    ],
    ids=["expression", "lines", "line", "replacement", "calculation", "flags"],
)
def test_a_hostile_script_is_one_message(
    text: str,
    keyword: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    if keyword == "longer":
        monkeypatch.setattr("msrl.limits.IMPORT_LIMIT_S", 0.5)
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert msrl("config", "import", "--from", "mindspeed-llm", str(script)) == 2
    error = capfd.readouterr().err
    assert "run.sh" in error and keyword in error and "Traceback" not in error


@pytest.mark.parametrize("command", ["config validate -c", "config import --from roll"])
def test_files_that_include_others_many_times_are_one_message(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """Each of 20 files includes the next one 20 times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msrl.limits.IMPORT_LIMIT_S", 1.0)
    for number in range(20):
        names = ", ".join([f"f{number + 1}"] * 20)
        Path(f"f{number}.yaml").write_text(f"defaults: [{names}]\nx{number}: 1\n")
    Path("f20.yaml").write_text("x: 1\n")
    assert msrl(*command.split(), "f0.yaml") == 2
    error = capfd.readouterr().err
    assert "f0.yaml" in error and "Traceback" not in error


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text",
    [
        lists(40).replace("a39", "user"),
        "user: " + "[" * 5000,
        "stop: 0x" + "f" * 6000,
        'user: "\\ud800{{content}}"',
    ],
)
def test_a_hostile_prompt_template_is_one_message(text: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("a0: &a0", "stop: &a0") if "a0" in text else text)
    start = time.process_time()
    with pytest.raises(MsrlError, match=mentions(file)) as caught:
        load_template(str(file))
    assert time.process_time() - start < 30
    assert len(str(caught.value)) < 10_000


def test_digits_and_nesting_on_the_command_line_are_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["train-sft", "--set", "train.steps=" + "9" * 6000],
        ["train-sft", "--set", "run.name=" + "[" * 5000],
        ["train-sft", "--steps", "9" * 6000],
        ["preprocess", "--map-keys", '{"a": ' + "9" * 6000 + "}"],
        ["preprocess", "--map-keys", '{"a": "b", "a": "c"}'],
        ["preprocess", "--map-keys", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"],
    ):
        assert msrl(*arguments) == 2
        assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "null", '{"model": {"type": "BPE", "vocab": 3}}', "[" * 100_000],
    ids=["open", "list", "null", "types", "nested"],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_malformed_tokenizer_is_named(name: str, content: str, tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    for read in (open_tokenizer, load_tokenizer):
        try:
            read(tmp_path)
        except MsrlError as error:
            assert_mentions(error, tmp_path)
        else:
            assert name == "tokenizer_config.json", "a tokenizer needs no valid configuration"


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG = {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b" * 1000}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 100
    + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    "special_tokens": {"a": {"id": "a", "ids": [0] * 100, "tokens": ["a"] * 100}},
}
EXPANDING = {
    "normalizer": [{"type": "Sequence", "normalizers": [DOUBLE] * 40}, LONG,
                   {"type": "Prepend", "prepend": "x" * 5000}],
    "decoder": [{"type": "Sequence", "decoders": [DOUBLE] * 40}],
    "post_processor": [TEMPLATE],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "rule"), [(p, r) for p, rules in EXPANDING.items() for r in rules]
)
def test_a_tokenizer_that_makes_texts_too_long_is_refused(part: str, rule: Any, tmp_path: Path):
    """Forty rules that double a letter would turn it into a terabyte."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: rule}))
    for read in (open_tokenizer, load_tokenizer):
        with pytest.raises(MsrlError, match=mentions(tmp_path, "limit")):
            read(tmp_path)


def test_a_regular_expression_that_fails_on_a_text_is_one_message(tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    values = {**json.loads(file.read_text()), "pre_tokenizer": {**pattern, "invert": False}}
    file.write_text(json.dumps(values))
    tokenizer = open_tokenizer(tmp_path)
    with pytest.raises(MsrlError, match=mentions(tmp_path, "fails")):
        encode_texts(tokenizer, ["a" * 60 + "b"])


RECURSION = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


TEN_MILLION = "('a\n' * 5000000)"


@pytest.mark.parametrize(
    ("template", "keyword"),
    [
        (RECURSION, "fails"),
        (LOOP, "longer"),
        ("{{ 'a' * 2000 }}", "characters"),
        ("{{ 1 / 0 }}", "fails"),
        ("{{ messages.x.y }}", "fails"),
        ("{{ raise_exception('\x1b[2J') }}", "x1b"),
        (r"{{ '\ud800' }}", "surrogate"),
        (r"{{ raise_exception('\ud800') }}", "fails"),
        ("{% generation %}" + RECURSION + "{% endgeneration %}", "fails"),
        pytest.param("{{ 7 ** 50000000 }}", "longer", marks=pytest.mark.full),
        pytest.param("{% set n = 10 %}{{ n ** (n ** 9) }}", "longer", marks=pytest.mark.full),
        pytest.param(f"{{{{ {TEN_MILLION} | wordwrap(1) }}}}", "longer", marks=pytest.mark.full),
        (f"{{{{ {TEN_MILLION} | indent(10**5) }}}}", "fails"),
        ("{{ ('a' * 2*10**9) | length }}", "memory"),
        ("{{ '%1000000000d' % 1 }}", "memory"),
        ("{{ '{:>1000000000}'.format(1) }}", "memory"),
        ("{% set t = namespace(x='aa') %}{% for i in range(40) %}{% set t.x = t.x ~ t.x %}"
         "{% endfor %}", "memory"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_hostile_chat_template_is_one_message(
    template: str, keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    limits = chat_rendering.RenderingLimits(time_s=1.0, characters=1000, memory_bytes=1 << 27)
    monkeypatch.setattr(chat_rendering, "LIMITS", limits)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    render = native_examples if "generation" in template else native_prompts
    with pytest.raises(MsrlError, match=mentions(tmp_path, keyword)) as caught:
        render(open_tokenizer(tmp_path), [QUESTION], None)
    assert "\x1b" not in str(caught.value)


@pytest.mark.slow
def test_every_process_renders_chat_templates_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Episodes, reward models and the server render the template of a model too."""
    limits = chat_rendering.RenderingLimits(time_s=0.2)
    monkeypatch.setattr(chat_rendering, "LIMITS", limits)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 7 ** 50000000 }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MsrlError, match=mentions("longer")):
        open_template(tmp_path, "").conversation(QUESTION.messages)
    with pytest.raises(chat_rendering.RenderingError, match=mentions("longer")):
        text_ids(tokenizer, "chat", "2+2?", "4", "")
    # transformers renders in the server, and vLLM a part of what it shows.
    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", None)
    limit_templates()
    with pytest.raises(TemplateError, match=mentions("longer")):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    shown = "{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], chat_template=shown, tokenize=False
    )
    assert text == f"a{tokenizer.eos_token}False"


@pytest.mark.slow
def test_a_killed_process_of_chat_templates_is_replaced_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chats = [chat_rendering.Chat("text", {"messages": [0]})]
    for _ in range(2):
        process = chat_rendering._process(os.getpid(), chat_rendering.LIMITS)._process
        process.kill()
        assert [chat.text for chat in chat_rendering.render_chats(chats)] == ["text"]
    code = (
        "import os, sys; from multiprocessing.connection import Connection as C; c = C(int({fd}));"
        "c.recv(); c.recv(); open({log}, 'a').write('x'); os.kill(os.getpid(), 9)"
    )
    log = tmp_path / "log"

    def dying(*words: str) -> list[str]:
        return [sys.executable, "-c", code.format(fd=words[-1], log=repr(str(log)))]

    monkeypatch.setattr(limited, "python_command", dying)
    limits = chat_rendering.RenderingLimits(time_s=9.0)  # so that another process starts
    monkeypatch.setattr(chat_rendering, "LIMITS", limits)
    with pytest.raises(chat_rendering.RenderingError, match=mentions("killed")):
        chat_rendering.render_chats(chats)
    assert log.read_text() == "xxx"


def test_a_time_limit_restores_the_timer_that_was_set_before():
    before = signal.getitimer(signal.ITIMER_REAL)[0]  # of pytest-timeout, if it is in use

    def outer() -> float:
        with pytest.raises(TimeLimitError):
            run_within(0.05, lambda: time.sleep(5))
        return signal.getitimer(signal.ITIMER_REAL)[0]

    assert 50 < run_within(60, outer) <= 60
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert before - 10 < after <= before


def test_a_function_that_catches_all_errors_ends_at_its_time_limit() -> None:
    def count() -> int:
        caught = 0
        while caught < 3:
            try:
                time.sleep(60)
            except Exception:
                caught += 1
        return caught

    with pytest.raises(TimeLimitError):
        run_within(0.01, count)


def test_an_error_of_c_code_after_the_time_limit_is_its_own() -> None:
    """Python calls the handler of a signal only after the call of C code that it interrupts."""
    handler = signal.getsignal(signal.SIGALRM)

    numbers: list[Any] = [1.0] * 10_000_000 + ["a"]
    with pytest.raises(TypeError, match="unsupported operand"):
        run_within(0.005, lambda: sum(numbers))
    assert signal.getsignal(signal.SIGALRM) is handler


def test_control_characters_of_messages_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    name = "model\x1b]0;title\x07\x9b2J"
    for arguments in (
        ["chat", "--model", name],
        ["train-sft", "-c", name],
        ["generate", "--model", name, "--prompt", "x"],
        ["doctor", "--no-imports", "-c", name],
    ):
        assert msrl(*arguments) == 2
        captured = capfd.readouterr()
        assert not set("\x1b\x07\x9b") & set(captured.err + captured.out)
        assert "x1b" in captured.err + captured.out
    assert printable("a\tb\n\x1b\x9b\u202e") == "a\tb\n\\x1b\\x9b\\u202e"


PLUGINS = {
    "parentheses": b"x=" + b"(" * 100_000 + b")" * 100_000,
    "signs": b"x=" + b"-" * 200_000 + b"1",
    "hole": 1 << 40,
    "null": b"a\0b",
    "bytes": b"\xff\xfe",
    "coding": b"# coding: rot13\n",
    "digits": b"x=" + b"9" * 10_000,
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("key", ["algo.policy_loss", "preprocess.handler", "environment.path"])
@pytest.mark.parametrize("content", PLUGINS)
def test_a_python_file_that_cannot_be_parsed_is_one_message(
    content: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Checks parse the files that a configuration of others names, and do not execute them."""
    monkeypatch.chdir(tmp_path)
    file, value = Path("own.py"), PLUGINS[content]
    file.write_bytes(value if isinstance(value, bytes) else b"")
    if isinstance(value, int):
        os.truncate(file, value)
    command = "preprocess" if "preprocess" in key else "train-grpo"
    with pytest.raises(MsrlError) as caught:
        load(sets=[f"{key}=own.py:f"], command=command)
    assert any("own.py" in line and key in line for line in str(caught.value).splitlines())


def test_a_long_file_with_few_values_is_within_the_limits(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("run: &a {name: x}\n" + "# comment\n" * 110_000)
    assert load([str(tmp_path / "a.yaml")]).config.run.name == "x"


@pytest.mark.slow
def test_few_open_files_are_refused_before_anything_starts(tmp_path: Path):
    save_model(tmp_path / "hf", tied=True)
    command = [sys.executable, "-m", "msrl", "chat", "--model", str(tmp_path / "hf")]
    limit = MIN_OPEN_FILES // 4
    limited = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert_mentions(done.stderr, f"ulimit -n {limit}")
    assert "Traceback" not in done.stderr


def test_a_model_config_of_hostile_values_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    save_model(tmp_path / "hf", tied=True)
    config = tmp_path / "hf" / "config.json"
    valid = json.loads(config.read_text())
    texts = (
        "[" * 100_000,
        '{"a": ' + "9" * 6000 + "}",
        json.dumps({**valid, "hidden_size": []}),
        json.dumps(valid)[:-1] + ', "hidden_size": 8}',
        json.dumps({**valid, "use_sliding_window": True, "layer_types": ["x"] * 1_000_000}),
    )
    for text in texts:
        config.write_text(text)
        assert msrl("generate", "--model", str(tmp_path / "hf"), "--prompt", "x") == 2
        error = capfd.readouterr().err
        assert "config.json" in error and len(error) < 5000
        assert "Traceback" not in error


@pytest.mark.parametrize("name", ["x" * 6000, "..", "", "a/b", "\0"])
def test_names_of_weight_files_that_no_file_can_have_are_refused(name: str, tmp_path: Path) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MsrlError, match=mentions("model.safetensors.index.json")):
        open_weight_files(tmp_path)
    assert weight_checks(tmp_path) == []


def test_a_manifest_with_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    check = FileCheck(tmp_path, "x" * 6000, lambda path, advance: "")
    assert check.num_bytes == 0 and "missing" in check.problem(lambda count: None)
