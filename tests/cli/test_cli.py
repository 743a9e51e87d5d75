"""Command line: options and configuration, exit codes, messages, imports of `msrl --help`."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config_inputs import GRPO, make_mcore, make_working_folder, skip_input_checks
from msrl.cli import app as cli
from msrl.cli.execute import WORKFLOWS
from msrl.config.schema import Config
from msrl.errors import MsrlError, VerificationError
from msrl.plan.run_plan import RunPlan
from support import assert_each_mentions, assert_mentions

COMMANDS = [
    [], ["preprocess"], ["train-sft"], ["train-dpo"], ["train-rm"], ["train-grpo"],
    ["train-distill"],
    ["generate"], ["chat"], ["serve"], ["eval"],
    ["convert-ckpt"], ["convert-ckpt", "hf2mcore"], ["convert-ckpt", "mcore2hf"],
    ["convert-ckpt", "reshard"], ["convert-ckpt", "inspect"], ["convert-ckpt", "hf2hf"],
    ["convert-ckpt", "gguf2hf"], ["convert-ckpt", "hf2gguf"],
    ["convert-ckpt", "lora2hf"],
    ["cluster"], ["cluster", "up"], ["cluster", "join"], ["cluster", "status"], ["cluster", "down"],
    ["config"], ["config", "show"], ["config", "validate"], ["config", "schema"],
    ["config", "import"], ["report"], ["view"], ["diagnose"], ["diagnose", "mismatch"],
    ["plan"], ["doctor"],
]  # fmt: skip
HEAVY = ("torch", "vllm", "megatron", "ray", "transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the inputs of trainings."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def msrl(*arguments: str) -> int:
    """Run the console script in this process and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["msrl", *arguments])
        try:
            cli.run()
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def record_calls(
    monkeypatch: pytest.MonkeyPatch, workflow: str, run: Callable[..., object] | None = None
) -> list[Any]:
    """Replace a workflow's module by a recorder; return the recorded configurations or plans."""
    calls: list[Any] = []

    def record(config: Config | RunPlan, **arguments: object) -> None:
        calls.append((config, arguments) if arguments else config)

    skip_input_checks(monkeypatch)
    functions: dict[str, Any] = dict.fromkeys(
        ("run", "up", "join", "status", "down"), run or record
    )
    functions["check"] = lambda *_, **__: None
    monkeypatch.setitem(
        sys.modules, WORKFLOWS[workflow.replace("_", "-")], SimpleNamespace(**functions)
    )
    return calls


def test_a_flag_of_mindspeeds_is_answered_with_the_command_that_reads_its_scripts(
    capsys: pytest.CaptureFixture[str],
):
    for flag, is_known in (("--use-mcore-models", True), ("--lode", False)):
        assert msrl("convert-ckpt", "hf2mcore", flag) == 2
        assert ("msrl config import --from mindspeed-llm" in capsys.readouterr().err) is is_known


def test_a_plan_shows_of_the_items_of_a_list_what_is_set():
    from msrl.config.schema import RewardSource
    from msrl.config.show import flow

    assert flow((RewardSource(verifier="acc", weight=0.5),)) == "[{verifier: acc, weight: 0.5}]"


@pytest.mark.slow
def test_help_in_a_fresh_process_is_quick_and_imports_nothing_heavy():
    program = (
        "import sys\n"
        "sys.argv[0] = 'msrl'\n"
        "from msrl.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        f"print('IMPORTED', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    seconds: list[float] = []
    for command in (
        ["--help"],
        ["--help"],
        ["convert-ckpt", "hf2mcore", "--help"],
        ["train-grpo", "--help"],
        ["--version"],
    ):
        output, cpu_s = run_python(program, *command)
        seconds.append(cpu_s)
        assert output.splitlines()[-1] == "IMPORTED []", output
    # Of the libraries that no help can do without, on this machine and under its present load.
    libraries = [run_python("import rich.console, typer.main")[1] for _ in range(2)]
    assert min(seconds[:2]) < max(0.4, 3 * min(libraries)), (seconds, libraries)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "x"],
        pytest.param(["chat"], marks=pytest.mark.full),
        pytest.param(["eval", "-c", "grpo.yaml", "--data", "data"], marks=pytest.mark.full),
    ],
)
def test_torch_of_an_engine_in_this_process_finds_its_variables(
    folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
):
    program = (
        "import os, sys\n"
        "class TorchImport:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            names = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'TORCH_CPP_LOG_LEVEL'\n"
        "            print([os.environ.get(name) for name in names], flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, TorchImport())\n"
        "from msrl.cli.app import main\n"
        "main()\n"
    )
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert run_python(program, *command, "model")[0] == "['PASSIVE', '100000', 'ERROR']\n"


def run_python(program: str, *arguments: str) -> tuple[str, float]:
    """Run a program in a fresh process; return its output and its CPU time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, cpu_s


def test_version_names_the_stack_that_is_installed(capsys: pytest.CaptureFixture[str]):
    assert msrl("--version") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"msrl \d+\.\d+\.\d+", lines[0])
    assert {line.split()[0] for line in lines} >= {"msrl", "python"}


def test_flags_overlay_the_keys_of_their_section(folder: Path, monkeypatch: pytest.MonkeyPatch):
    calls = record_calls(monkeypatch, "convert_ckpt")
    (folder / "c.yaml").write_text("convert: {load: model, tp: 4, dtype: fp16}\n", encoding="utf-8")
    arguments = [
        "convert-ckpt",
        "hf2mcore",
        "-c",
        "c.yaml",
        "--set",
        "convert.pp=2",
        "--save-dir",
        "out",
        "--platform",
        "cpu",
    ]
    assert (
        msrl(*arguments, "--target-tensor-parallel-size", "2", "--no-verify", "--names", "te") == 0
    )
    convert = calls[0].convert
    assert (convert.command, convert.load, convert.save, convert.tp, convert.pp) == (
        "hf2mcore",
        "model",
        "out",
        2,
        2,
    )
    assert (convert.dtype, convert.names, convert.verify, calls[0].cluster.platform) == (
        "fp16",
        "te",
        False,
        "cpu",
    )


def test_every_subcommand_of_conversion_sets_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, "convert_ckpt")
    make_mcore(folder / "mcore")
    assert (
        msrl("convert-ckpt", "inspect", "mcore")
        == msrl("convert-ckpt", "inspect", "--load", "mcore")
        == 0
    )
    assert msrl("convert-ckpt", "inspect", "mcore", "--load", "mcore") == 2
    assert (
        msrl("convert-ckpt", "mcore2hf", "--load", "mcore", "--save", "a", "--hf-config", "model")
        == 0
    )
    assert msrl("convert-ckpt", "reshard", "--load", "mcore", "--save", "b", "--pp", "2") == 0
    assert [call.convert.command for call in calls] == ["inspect", "inspect", "mcore2hf", "reshard"]
    assert calls[0].convert.load == calls[1].convert.load == "mcore"


def test_preprocess_takes_several_files_and_renamed_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, "preprocess")
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (folder / name).write_text("", encoding="utf-8")
    arguments = [
        "--input",
        "a.jsonl",
        "b.jsonl",
        "--input",
        "c.jsonl",
        "--tokenizer-name-or-path",
        "model",
        "--handler-name",
        "alpaca",
    ]
    more = [
        "--prompt-type",
        "qwen",
        "--output-prefix",
        "out/x",
        "--seq-length",
        "64",
        "--pack",
        "--workers",
        "2",
    ]
    more += ["--kind", "prompts", "--too-long", "truncate"]
    assert msrl("preprocess", *arguments, *more, "--map-keys", '{"prompt": "question"}') == 0
    preprocess = calls[0].preprocess
    assert sorted(preprocess.input) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert (preprocess.tokenizer, preprocess.handler, preprocess.template, preprocess.kind) == (
        "model",
        "alpaca",
        "qwen",
        "prompts",
    )
    assert (preprocess.seq_length, preprocess.pack, preprocess.workers, preprocess.map_keys) == (
        64,
        True,
        2,
        {"prompt": "question"},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{x", ("--map-keys", "JSON", "character 2")),
        ("[1]", ("--map-keys=[1]", "JSON object")),
        ('{"a": [1]}', ("--map-keys", "preprocess.map_keys.a=[1]", "text")),
    ],
)
def test_column_names_without_a_mapping_are_refused(
    text: str, message: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("preprocess", "--map-keys", text) == 2
    assert_mentions(capsys.readouterr().err, *message)


def test_generation_flags_reach_their_keys_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, "generate")
    sampling = [
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "5",
        "--min-p",
        "0.1",
        "--num-samples",
        "2",
        "--seed",
        "3",
    ]
    sampling += ["--stop", "a", "--stop", "b"]
    assert (
        msrl(
            "generate",
            "--model",
            "model",
            "--prompt",
            "2 ${run.name} $${",
            "--dtype",
            "float32",
            "--max-tokens",
            "7",
            *sampling,
        )
        == 0
    )
    generate = calls[0].generate
    assert (generate.prompt, generate.max_tokens, generate.temperature) == (
        "2 ${run.name} $${",
        7,
        0.5,
    )
    assert (generate.top_p, generate.top_k) == (0.9, 5)
    assert (generate.min_p, generate.num_samples, generate.seed, generate.stop, generate.dtype) == (
        0.1,
        2,
        3,
        ("a", "b"),
        "float32",
    )


def test_training_takes_a_configuration_by_name_and_a_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, "train_grpo")
    (folder / "configs").mkdir()
    (folder / "configs" / "mine.yaml").write_text(GRPO + "run: {name: mine}\n", encoding="utf-8")
    assert msrl("train-grpo", "--config-name", "mine", "--resume", "auto") == 0
    assert msrl("train-grpo", "--config-name", "mine.yaml", "--set", "run.name=other") == 0
    configs = [call.config for call in calls]
    assert [(config.run.name, config.checkpoint.resume) for config in configs] == [
        ("mine", "auto"),
        ("other", "none"),
    ]


def test_an_unknown_configuration_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert msrl("train-grpo", "--config-name", "grp") == 2
    assert_each_mentions(
        capsys.readouterr().err.splitlines(), ("--config-name=grp", "./configs", "'grpo'")
    )


def test_cluster_commands_pass_their_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch):
    calls = record_calls(monkeypatch, "cluster")
    assert msrl("cluster", "up", "--port", "7000", "--devices", "2", "--platform", "cpu") == 0
    config, arguments = calls.pop()
    assert (config.cluster.platform, config.cluster.devices_per_node) == ("cpu", 2)
    assert arguments == {
        "host": "127.0.0.1",
        "port": 7000,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 8260,
        "new_token": False,
        "wait": None,
    }
    assert msrl("cluster", "join", "10.0.0.1:7000") == 0
    assert calls.pop()[1] == {"address": "10.0.0.1:7000", "host": None}
    assert msrl("cluster", "status", "--json") == 0
    assert calls.pop()[1] == {"json": True}
    assert msrl("cluster", "down", "--dry-run") == 0
    assert not calls
    assert msrl("cluster", "down") == 0
    assert calls.pop()[1] == {"force": False}


@pytest.mark.parametrize("command", ["train-sft", "train-grpo"])
def test_a_dry_run_prints_the_arithmetic_and_starts_nothing(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, command.replace("-", "_"))
    assert (
        msrl(
            command,
            "-c",
            "grpo.yaml",
            "--set",
            "cluster.devices_per_node=4",
            "--set",
            "train.parallel.tp=2",
            "--dry-run",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert_mentions(out.splitlines()[0], command, "configuration")
    assert "  train.steps: 10  # grpo.yaml:3\n" in out
    assert "  train.parallel.tp: 2  # --set\n" in out
    assert "  data parallel: 2\n" in out
    assert_mentions(out, "rank 3", "tp 1 dp 1 pp 0")
    # A rank has 91,009 parameters: 4 layers of (12,288 + 3 * 3,072 + 64) weights, 64 biases of qkv
    # and 128 of norms, the embedding and a norm.
    assert re.search(r"^peak memory\b.*device", out, re.M)
    assert re.search(r"^  optimizer +[\d.]+ MB$", out, re.M) and re.search(
        r"^  .*training +[\d.]+ MB$", out, re.M
    )
    assert not calls


def test_mistakes_go_to_standard_error_and_exit_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert (
        msrl("train-sft", "-c", "sft.yaml", "--set", "train.stps=3", "--set", "model.dtype=fp8")
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_each_mentions(
        captured.err.splitlines(),
        ("--set: model.dtype=fp8", "float32", "bfloat16"),
        ("--set: train.stps=3", "key", "'steps'"),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train-sft", "--nonsense"],
        ["convert-ckpt", "hf2mcore", "--tp", "two"],
        ["cluster", "join"],
        ["config", "import", "--from", "vrl", "run.sh"],
    ],
)
def test_misused_commands_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert msrl(*arguments) == 2
    message = capsys.readouterr().err
    assert "Usage: msrl" in message and "Value error" not in message


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MsrlError("tell the user"), 2, "tell the user\n"),
        (VerificationError("logits differ"), 1, "logits differ\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes_of_what_a_workflow_raises(
    error: BaseException,
    code: int,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(config: Config) -> None:
        raise error

    record_calls(monkeypatch, "train_sft", fail)
    assert msrl("train-sft", "-c", "sft.yaml") == code
    assert capsys.readouterr().err == message


def test_internal_errors_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(config: Config) -> None:
        raise ZeroDivisionError("ours")

    record_calls(monkeypatch, "train_sft", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        msrl("train-sft", "-c", "sft.yaml")


def test_config_show_prints_origins_and_arithmetic(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("config", "show", "-c", "grpo.yaml", "--set", "run.seed=4") == 0
    out = capsys.readouterr().out
    assert re.search(r"^  seed: 4 +# --set$", out, re.MULTILINE)
    assert re.search(r"^  prompts_per_step: 4 +# grpo.yaml:5$", out, re.MULTILINE)
    assert re.search(r"^    lr: 1.0e-05 +# default$", out, re.MULTILINE)
    assert "# samples per step: 32\n" in out
    assert msrl("config", "show", "-c", "grpo.yaml", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["rollout"]["prompts_per_step"] == 4
    assert shown["origins"]["rollout.prompts_per_step"] == "grpo.yaml:5"
    assert shown["derived"]["samples per step"] == 32


def test_config_validate_checks_as_the_command_would(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("config", "validate", "-c", "grpo.yaml") == 0
    assert_each_mentions(capsys.readouterr().out.splitlines(), ("configuration", "train-grpo"))
    assert msrl("config", "validate", "-c", "sft.yaml", "--for", "train-grpo") == 2
    assert_mentions(capsys.readouterr().err, "reward.sources", "missing")


def test_config_schema_describes_every_key(capsys: pytest.CaptureFixture[str]):
    assert msrl("config", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Config.model_fields)
    sections = schema["$defs"]
    for name, section in sections.items():
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            # pydantic drops a description that equals the one of the referenced section.
            reference = sections.get(value.get("$ref", "").rpartition("/")[2], {})
            description = value.get("description") or reference.get("description")
            assert description and description.endswith("."), f"{name}.{key}"


def test_the_console_script_ends_with_the_code_and_no_traceback(folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "msrl", "convert-ckpt", "hf2mcore", "--load", "gone",
         "--save", "new"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert_each_mentions(done.stderr.splitlines(), ("--load: convert.load=gone", "folder"))


TRAINING_FLAGS = {
    "--model": ("model.path", "model"),
    "--data": ("data.train", "data"),
    "--name": ("run.name", "mine"),
    "--steps": ("train.steps", 7),
    "--lr": ("train.optimizer.lr", 3e-4),
    "--tp": ("train.parallel.tp", 2),
    "--pp": ("train.parallel.pp", 2),
}
TRAINING_ARGUMENTS = [
    word for flag, (_, value) in TRAINING_FLAGS.items() for word in (flag, str(value))
]


@pytest.mark.parametrize("command", ["train-sft", "train-grpo"])
def test_flags_of_the_trainings_override_files_and_set(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, command.replace("-", "_"))
    (folder / "c.yaml").write_text(
        "train: {steps: 3, optimizer: {lr: 1e-6}}\nrun: {name: of_file}\n", encoding="utf-8"
    )
    base = "sft.yaml" if command == "train-sft" else "grpo.yaml"
    files = [
        "-c",
        base,
        "-c",
        "c.yaml",
        "--set",
        "train.steps=4",
        "--set",
        "cluster.devices_per_node=4",
    ]
    assert msrl(command, *files, *TRAINING_ARGUMENTS) == 0
    dumped = calls[0].config.model_dump()
    for key, value in TRAINING_FLAGS.values():
        actual: Any = dumped
        for name in key.split("."):
            actual = actual[name]
        assert actual == value, key


@pytest.mark.parametrize("command", ["train-sft", "train-grpo"])
def test_config_show_names_the_flag_that_set_a_key(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    base = "sft.yaml" if command == "train-sft" else "grpo.yaml"
    arguments = [
        "-c",
        base,
        "--for",
        command,
        "--set",
        "cluster.devices_per_node=4",
        *TRAINING_ARGUMENTS,
    ]
    assert msrl("config", "show", *arguments, "--json") == 0
    origins = json.loads(capsys.readouterr().out)["origins"]
    assert {flag: origins[key] for flag, (key, _) in TRAINING_FLAGS.items()} == {
        flag: flag for flag in TRAINING_FLAGS
    }
    assert msrl("config", "show", *arguments) == 0
    assert re.search(r"^    lr: 0.0003 +# --lr$", capsys.readouterr().out, re.M)
    assert msrl("config", "validate", *arguments) == 0


def test_the_plan_of_a_dry_run_names_the_flag_that_set_a_key(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    skip_input_checks(monkeypatch)
    assert msrl("train-sft", "-c", "sft.yaml", "--lr", "3e-4", "--dry-run") == 0
    assert "  train.optimizer.lr: 0.0003  # --lr\n" in capsys.readouterr().out


def test_config_show_takes_the_flags_of_the_command_it_is_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("config", "show", "--for", "chat", "--model", "model", "--tp", "2", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["config"]["chat"]["model"], shown["origins"]["chat.model"]) == (
        "model",
        "--model",
    )
    assert (shown["config"]["rollout"]["engine"]["tp"], shown["origins"]["rollout.engine.tp"]) == (
        2,
        "--tp",
    )
    assert msrl("config", "show", "--for", "chat", "--lr", "1e-5") == 2
    assert capsys.readouterr().err.startswith("--lr: chat")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_tp_of_commands_with_an_engine_is_the_engines(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, command)
    prompt = ["--prompt", "x"] if command == "generate" else []
    model = ["model"] if command == "serve" else ["--model", "model"]
    assert msrl(command, *model, "--tp", "2", *prompt) == 0
    assert calls[0].rollout.engine.tp == 2


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_model_is_named_by_an_argument_or_an_option(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    calls = record_calls(monkeypatch, command)
    prompt = ["--prompt", "x"] if command == "generate" else []
    for words in (["model"], ["--model", "model"]):
        assert msrl(command, *words, *prompt) == 0
        assert getattr(calls[-1], command).model == "model"
    assert msrl(command, "model", "--model", "other", *prompt) == 2
    assert_mentions(capsys.readouterr().err, "--model=other", "model")
    assert msrl(command, "base.yaml", *prompt) == 2
    assert_mentions(capsys.readouterr().err, "-c base.yaml")


def test_models_of_an_evaluation_are_arguments_and_options(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("eval", "--model", "gone", "--model", "lost", "absent") == 2
    shown = capsys.readouterr().err
    assert_mentions(shown, "models.0=gone", "models.1=lost", "models.2=absent")


def test_every_prompt_of_the_command_line_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = record_calls(monkeypatch, "generate")
    assert msrl("generate", "model", "--prompt", "2+2=", "--prompt", "3+3=") == 0
    assert calls[0].generate.prompt == ("2+2=", "3+3=")


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["grpo"], "`msrl train-grpo`"),
        (["sft"], "`msrl train-sft`"),
        (["gen"], "`msrl generate`"),
        (["deploy"], "`msrl serve`"),
        (["evaluate"], "`msrl eval`"),
        (["serve", "model", "--api-key", "x"], "--api-key-file"),
        (["serve", "mod"], "did you mean model?"),
        (["prepocess"], "`msrl preprocess`"),
        (["hf2mcore"], "`msrl convert-ckpt hf2mcore`"),
        (["train"], "`msrl train-sft` or `msrl train-dpo`"),
        (["config", "sho"], "`msrl config show`"),
        (["nonsense"], "`msrl --help`"),
        (["train-kto"], "`msrl train-dpo`"),
        (["orm"], "`msrl train-rm`"),
        (["gkd"], "`msrl train-distill`"),
        (["train-grpo", "--set", "rollout.multi_turn=true"], "environment.name"),
        (["train-grpo", "base.yaml"], "-c base.yaml"),
        (["train-grpo", "grpo"], "-c grpo"),
        (["train-sft", "train.steps=3"], "--set train.steps=3"),
        (["train-sft", "--learning-rate", "1"], "--lr"),
        (["convert-ckpt", "hf2mcore", "--layout", "dist"], "--format"),
        (["convert-ckpt", "hf2mcore", "--set", "convert.layout=dist"], "convert.format"),
        (["train-sft", "--warmup", "1"], "--set train.optimizer.warmup=VALUE"),
        (["train-sft", "--platform", "gpu"], "'cuda'"),
        (["train-sft", "--set", "cluster.platform=gpu"], "'cuda'"),
        (["train-sft", "--set", "model.dtype=bf16"], "'bfloat16'"),
        (["train-sft", "--set", "train.learning_rate=1e-6"], "'train.optimizer.lr'"),
        (["train-grpo", "--set", "rollout.max_new_tokens=8"], "'rollout.max_response_tokens'"),
        (["train-sft", "--steps", "ten"], "'ten'"),
        (["train-sft", "--lr=fast"], "'fast'"),
        (["train-sft", "--model", "modell"], "did you mean model?"),
        (["preprocess", "--input", "mod"], "did you mean model?"),
        (["train-sft", "--model", "gone"], "Relative paths"),
        (["doctor", "--no-imports", "--platform", "gpu"], "'cuda'"),
        (["train-sft", "--model", "Qwen/Qwen2.5-0.5B"], "HF_ENDPOINT"),
        (["generate", "--model", "Qwen/Qwen2.5-0.5B", "--prompt", "x"], "HF_ENDPOINT"),
        (
            ["convert-ckpt", "hf2mcore", "--load", "Qwen/Qwen2.5-0.5B", "--save", "out"],
            "HF_ENDPOINT",
        ),
        (["preprocess", "--tokenizer", "Qwen/Qwen2.5-0.5B"], "HF_ENDPOINT"),
        (["train-sft", "--set", "checkpoint.load=Qwen/Qwen2.5-0.5B"], "folders on disk"),
        (
            [
                "train-grpo",
                "-c",
                "grpo.yaml",
                "--set",
                "reward.sources=[{model: Qwen/Qwen2.5-0.5B}]",
            ],
            "HF_ENDPOINT",
        ),
        (
            ["train-grpo", "-c", "grpo.yaml", "--set", "reward.sources=[{verifier: math}]"],
            "'math_verify_reward', 'math_17k_acc' or 'acc'",
        ),
    ],
)
def test_mistakes_are_answered_with_what_was_probably_meant(
    arguments: list[str], suggestion: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl(*arguments) == 2
    captured = capsys.readouterr()
    assert suggestion in captured.err + captured.out


def test_a_missing_folder_is_not_treated_as_a_hub_id(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    for path in ("gone", "./models/gone", "/models/gone", "data/gone/deep"):
        assert msrl("train-sft", "-c", "sft.yaml", "--model", path) == 2
        assert "folders on disk" not in capsys.readouterr().err
