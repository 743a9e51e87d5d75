"""`msrl diagnose mismatch` on a real run with adapters, and on an engine of another dtype."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from msrl.cli.configuration import load_configuration
from msrl.config.sections.rollout import EngineConfig
from msrl.diagnose.verdict import Verdict, judge
from msrl.errors import MsrlError
from msrl.platforms import get
from msrl.rollout import engine_arguments
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.workflows.diagnose.collect import compare, open_engine, open_ranks
from msrl.workflows.diagnose.run import run
from msrl.workflows.diagnose.target import open_target
from support import assert_mentions, mentions
from test_train_grpo import make_inputs, settings
from tiny_qwen2 import save_model
from training_runs import (
    Command,
    children,
    files_in,
    make_tmp,
    succeed,
    wait_for_end,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_a_run_with_adapters_is_healthy_and_agrees_with_its_record(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    train = {"steps": 2, "micro_batch": 2, "optimizer": {"lr": 2e-3}, "lora": {"rank": 2}}
    config = settings(inputs, "adapted", "untied", train=train)
    file = write_config(inputs / "adapted.yaml", config)
    succeed("train-grpo", "-c", str(file), log=inputs / "adapted.log")
    run_dir = inputs / "runs" / "adapted"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["metrics"]["rollout/logprob_gap"] < 1e-4 for row in rows if row["step"])
    log = inputs / "diagnose.log"
    output = succeed("diagnose", "mismatch", str(run_dir), "--json", log=log)
    report = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert report["healthy"]
    (recorded,) = [row for row in report["comparisons"] if "recorded" in row["compared"]]
    assert recorded["num_tokens"] > 0
    assert recorded["largest"] < 1e-3


def test_the_template_of_a_run_may_differ_from_that_of_its_initial_model(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    file = inputs / "untied" / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    train = {"steps": 1, "micro_batch": 2, "optimizer": {"lr": 2e-3}}
    configuration = write_config(
        inputs / "first.yaml", settings(inputs, "first", "untied", train=train)
    )
    succeed("train-grpo", "-c", str(configuration), log=inputs / "first.log")
    run_dir = inputs / "runs" / "first"
    shutil.rmtree(run_dir / "checkpoints")  # the record of step 1 belongs to the initial model
    output = succeed("diagnose", "mismatch", str(run_dir), "--json", log=inputs / "diagnose.log")
    report = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert report["healthy"]
    assert any("recorded" in row["compared"] for row in report["comparisons"])


@pytest.mark.parametrize(("name", "word"), [("msrl-rank-0", "SIGKILL"), ("VLLM", "killed")])
def test_a_killed_rank_or_engine_ends_the_command_with_one_message(
    name: str, word: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", tied=True)
    words = ("diagnose", "mismatch", str(tmp_path / "model"), "--set", "model.dtype=float32")
    tmp = make_tmp()
    command = Command(*words, "--set", "rollout.engine.tp=2", log=tmp_path / "log", tmp=tmp)
    command.when(lambda: "into the engine" in command.output())
    started = children(command.process.pid)
    victim = next(pid for pid in started if psutil.Process(pid).name().startswith(name))
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 1, command.output()
    assert_mentions(command.output(), word)
    assert "Traceback" not in command.output()
    wait_for_end(started)
    assert files_in(tmp) == []


GAP = "engine, trainer"


def test_rounding_of_bfloat16_is_healthy_with_either_dtype_of_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, tied=True)
    verdicts: dict[str, Verdict] = {}
    for logits in ("null", "float32"):
        sets = [f"model.path={tmp_path}", "rollout.max_prompt_tokens=400"]
        config = load_configuration(sets=[*sets, f"model.logits_dtype={logits}"]).config
        verdicts[logits], _ = run(config, None)
    gaps = {
        logits: {each.compared: each.gap for each in verdict.comparisons}
        for logits, verdict in verdicts.items()
    }
    assert all(verdict.cause is None for verdict in verdicts.values()), gaps
    assert gaps["float32"][GAP].mean < gaps["null"][GAP].mean
    rounded, exact = (verdicts[logits].rounding for logits in ("null", "float32"))
    assert rounded is not None and exact is not None
    # The engines sample different tokens. On the same ones, test_widened compares the roundings.
    assert exact.mean > 0 and rounded.mean > 0
    # An engine whose class of the model rounds its logits is refused.
    monkeypatch.setitem(engine_arguments._ARGUMENTS, "hf_overrides", (None, lambda *_: None))
    settings = EngineSettings(
        tmp_path,
        dtype="bfloat16",
        logits_dtype="float32",
        engine=EngineConfig(max_model_len=64, max_num_seqs=2),
    )
    with pytest.raises(MsrlError, match=mentions("model.logits_dtype=float32", "bfloat16")):
        VllmEngine(settings, get("cpu"))


def test_another_dtype_of_the_engine_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, tied=False)
    sets = [f"model.path={tmp_path}", "rollout.max_prompt_tokens=400"]
    dtypes = ("float32", "bfloat16")
    configs = {
        dtype: load_configuration(sets=[*sets, f"model.dtype={dtype}"]).config for dtype in dtypes
    }
    targets = {dtype: open_target(config, "cpu", None) for dtype, config in configs.items()}
    target, platform = targets["float32"], get("cpu")
    with (
        open_ranks(target, platform) as trainers,
        open_engine(targets["bfloat16"], platform) as engine,
    ):
        cause = judge(compare(target, trainers, engine)).cause
    assert cause is not None
    assert cause.name == "dtype"
    assert_mentions(cause.problem, "bfloat16", "float32")
