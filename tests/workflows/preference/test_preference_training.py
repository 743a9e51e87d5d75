"""Preference training and reward models on real ranks, compared with transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.adapters.merge import MergedSource
from msrl.checkpoint.source import open_weights
from msrl.cli import app
from msrl.config.schema import Config
from msrl.data.dataset import StepDataset
from msrl.data.preferences import PreferenceDataset
from msrl.data.tokenizer import open_tokenizer
from msrl.models.families import all_rules
from msrl.plan.run_plan import resolve
from msrl.types import RenderedExample, RenderedPreference
from msrl.workflows.sft.rows import split
from support import shared_data
from tiny_qwen2 import save_model
from training_runs import metrics, succeed, write_config, write_rows
from transformers_logprobs import token_logprobs

pytestmark = pytest.mark.slow
STEPS = 4
LIMIT = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, pairs and labeled answers."""
    folder = tmp_path_factory.mktemp("preference")
    save_model(folder / "model", tied=False, positions=256)
    pairs = [
        {
            "prompt": f"{i}+{i}=",
            "chosen": f"{2 * i}" * (1 + i % 3),
            "rejected": "no" * (1 + i % 4),
            "weight": 1.0 + i % 2,
        }
        for i in range(28)
    ]
    labeled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    margins = [{**row, "margin": 0.25 * (i % 3)} for i, row in enumerate(pairs)]
    for name, rows in (("pairs", pairs), ("labeled", labeled), ("margins", margins)):
        preprocess(folder, name, rows, "labeled" if name == "labeled" else "pairs")
    return folder


def preprocess(folder: Path, name: str, rows: Any, handler: str) -> None:
    source = str(write_rows(folder / f"{name}.jsonl", rows))
    arguments = ["preprocess", "--input", source, "--tokenizer", str(folder / "model")]
    arguments += ["--handler", handler, "--template", "qwen"]
    app.app([*arguments, "--output-prefix", str(folder / name)], standalone_mode=False)


def settings(inputs: Path, name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run of DPO, with some sections changed."""
    base: dict[str, Any] = {
        "run": {"name": name, "dir": str(inputs / "runs"), "deterministic": True},
        "model": {"path": str(inputs / "model"), "dtype": "float32"},
        "data": {"train": str(inputs / "pairs"), "eval_fraction": 0.25, "seq_length": LIMIT},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 300.0},
        "train": {
            "steps": STEPS,
            "global_batch": 4,
            "micro_batch": 2,
            "optimizer": {"lr": 1e-3, "warmup": 1},
        },
        "eval": {"every_steps": 2},
        "log": {"trackers": []},
    }
    return {**base, **{key: {**base.get(key, {}), **value} for key, value in sections.items()}}


def run_in_process(config: Mapping[str, Any], command: str = "train-dpo") -> Path:
    """Run a training whose ranks are processes of this machine; return the folder of the run."""
    from msrl.workflows.preference import reward_model
    from msrl.workflows.preference import run as preference

    workflow = preference if command == "train-dpo" else reward_model
    validated = Config.model_validate(config, strict=False)
    workflow.run(resolve(validated, command))
    return Path(validated.run.dir) / validated.run.name


def weights(checkpoint: Path, adapters_of: Path | None = None) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint by Hugging Face name, with adapters merged into a base."""
    if adapters_of is None:
        source = open_weights(checkpoint)
    else:
        base = open_weights(adapters_of)
        source = MergedSource(base, read_adapter(checkpoint, base.shape))
    return {
        name: tensor.clone()
        for rule in all_rules(source.shape)
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def assert_resumes_bit_by_bit(
    run: Path, config: dict[str, Any], command: str, adapters_of: Path | None = None
) -> None:
    """Repeat the second half of a run from its checkpoint, and compare all results."""
    config = {**config, "run": {**config["run"], "name": f"{run.name}-resumed"}}
    config["checkpoint"] = {**config["checkpoint"], "resume": str(run / "checkpoints")}
    copy = run.with_name(f"{run.name}-resumed") / "checkpoints"
    shutil.copytree(run / "checkpoints", copy)
    for folder in (copy / f"iter_{STEPS:07d}", copy / "training" / f"iter_{STEPS:07d}"):
        shutil.rmtree(folder)
    (copy / "latest_checkpointed_iteration.txt").write_text(str(STEPS // 2))
    config["checkpoint"]["resume"] = "auto"
    resumed = run_in_process(config, command)
    assert metrics(resumed) == metrics(run)[STEPS // 2 :]
    before, after = (weights(each / "checkpoints", adapters_of) for each in (run, resumed))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- preference training ---


def answer_logprob(model: Any, side: RenderedExample) -> float:
    """Return the log-probability of an answer under a model of transformers."""
    return float(token_logprobs(model, side.token_ids)[side.loss_mask[1:]].sum())


def held_out(config: Config, kind: str = "pairs") -> list[Any]:
    data = PreferenceDataset(str(config.data.train), kind)
    numbers = split(len(data), config.data.eval_fraction, config.run.seed)[1]
    return [data[number] for number in numbers]


SAVES = {"every_steps": STEPS // 2, "export_hf": True}


def test_dpo_starts_at_log_2_agrees_with_transformers_and_resumes_bit_by_bit(inputs: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = settings(inputs, "dpo", train={"parallel": {"tp": 2}}, checkpoint=SAVES)
    run = run_in_process(config)
    steps = metrics(run)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["train/margin"] == pytest.approx(0.0, abs=1e-5)
    seconds = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["seconds"]
    assert 0 < seconds["reference"] < seconds["step"]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (run / "hf", inputs / "model")
    )
    rows = held_out(Config.model_validate(config, strict=False))
    sides = [
        [
            0.1 * (answer_logprob(policy, side) - answer_logprob(reference, side))
            for side in row.sides
        ]
        for row in rows
    ]
    chosen, rejected = torch.tensor(sides, dtype=torch.float64).T
    margins = chosen - rejected
    weight = torch.tensor([row.weight for row in rows], dtype=torch.float64)
    expected = {
        "eval/loss": -F.logsigmoid(margins),
        "eval/margin": margins,
        "eval/accuracy": (margins > 0).double(),
        "eval/chosen_reward": chosen,
    }
    for name, values in expected.items():
        mean = ((values * weight).sum() / weight.sum()).item()
        assert steps[-1][name] == pytest.approx(mean, abs=1e-4), name
    assert_resumes_bit_by_bit(run, config, "train-dpo")


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"train": {"parallel": {"tp": 2, "sp": True}}},
    "pp2": {"train": {"parallel": {"pp": 2}}},
    "cp2": {"train": {"parallel": {"cp": 2}}},
    "dp2": {"cluster": {"devices_per_node": 2}},
    "micro-batches of 1": {"train": {"micro_batch": 1}},
    "micro-batches by tokens": {"train": {"max_tokens_per_micro_batch": 400}},
    "chunked logits": {"train": {"chunk": 7}},
    "recomputed": {"train": {"recompute": {"granularity": "full"}}},
}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"options": {"label_smoothing": 0.1}},
    "ipo": {},
    "simpo": {"sft_coef": 0.1},
    "orpo": {},
    "cpo": {},
    "kto": {"options": {"desirable_weight": 1.5}},
}


def curve(inputs: Path, name: str, loss: str, changes: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the metrics of a run at a low learning rate, so that roundings do not grow."""
    data = {"train": str(inputs / ("labeled" if loss == "kto" else "pairs"))}
    preference = {"preference": {"loss": loss, **LOSSES[loss]}}
    config = settings(inputs, name, data=data, algo=preference)
    for section, values in changes.items():
        config[section] = {**config[section], **values}
    if "max_tokens_per_micro_batch" in config["train"]:
        del config["train"]["micro_batch"]
    config["train"]["optimizer"] = {"lr": 1e-4}
    return metrics(run_in_process(config))


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES)
def test_curves_agree_across_parallel_layouts_and_micro_batches(inputs: Path, loss: str) -> None:
    single = curve(inputs, f"{loss} single", loss, {})
    layouts = LAYOUTS if loss in ("dpo", "kto") else {"tp2 sp": LAYOUTS["tp2 sp"]}
    for name, changes in layouts.items():
        split = curve(inputs, f"{loss} {name}", loss, changes)
        for number, (step, other) in enumerate(zip(single, split, strict=True)):
            # All margins are 0 up to rounding before the first update, so that their signs vary.
            excluded = {"train/grad_norm"} | ({"train/accuracy"} if number == 0 else set())
            for key in step.keys() - excluded:
                if not key.startswith("perf/"):
                    # Rewards and margins are differences of sums over whole answers.
                    tolerance = 1e-5 if key.endswith("loss") else 1e-4
                    expected = pytest.approx(step[key], abs=tolerance, rel=tolerance)
                    assert other[key] == expected, (name, key)


@pytest.mark.full
def test_packed_pairs_and_a_precomputed_reference_train_equally(inputs: Path) -> None:
    data = {
        "seq_length": LIMIT,
        "pack": True,
        "eval_fraction": 0.25,
        "train": str(inputs / "pairs"),
    }
    train = {"steps": STEPS, "global_batch": 2, "micro_batch": 1, "optimizer": {"lr": 1e-4}}
    fly = metrics(run_in_process(settings(inputs, "fly", data=data, train=train)))
    stored = settings(
        inputs, "stored", data=data, train=train, algo={"preference": {"reference": "precomputed"}}
    )
    run = run_in_process(stored)
    assert len(list(run.glob("reference_*.npz"))) == 1
    for step, other in zip(fly, metrics(run), strict=True):
        assert other["train/loss"] == pytest.approx(step["train/loss"], abs=1e-5)
    assert all("eval/accuracy" in step for step in fly[1::2])


@pytest.mark.full
def test_the_reference_of_adapters_is_the_model_without_them(inputs: Path) -> None:
    lora = {"lora": {"rank": 4}, "steps": STEPS, "optimizer": {"lr": 1e-3}}
    runs = [
        run_in_process(settings(inputs, name, train={**lora, "global_batch": 4}, algo=algo))
        for name, algo in (
            ("lora", {}),
            ("lora stored", {"preference": {"reference": "precomputed"}}),
        )
    ]
    own, stored = map(metrics, runs)
    assert own[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert own[-1]["train/margin"] != 0
    for step, other in zip(own, stored, strict=True):
        assert other["train/loss"] == pytest.approx(step["train/loss"], abs=1e-5)


@pytest.mark.full
def test_adapters_that_start_from_earlier_ones_are_policy_and_reference(inputs: Path) -> None:
    simpo = {"preference": {"loss": "simpo"}}
    train = {"steps": STEPS, "global_batch": 4, "optimizer": {"lr": 3e-3}, "lora": {"rank": 4}}
    earlier = run_in_process(settings(inputs, "earlier", train=train, algo=simpo, checkpoint=SAVES))
    start = {**train, "lora": {"rank": 4, "load": str(earlier / "checkpoints")}}
    merged, adapted = (
        metrics(run_in_process(settings(inputs, name, algo=simpo, **sections)))
        for name, sections in (
            ("merged", {"model": {"path": str(earlier / "hf")}}),
            ("adapted", {"train": {**start, "parallel": {"pp": 2}}}),
        )
    )
    assert adapted[0]["train/loss"] == pytest.approx(merged[0]["train/loss"], abs=1e-5)
    assert abs(merged[0]["train/loss"] - metrics(earlier)[0]["train/loss"]) > 1e-3
    config = settings(inputs, "continued", train=start, checkpoint=SAVES)
    run = run_in_process(config)
    steps = metrics(run)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1]["train/margin"] != 0
    assert_resumes_bit_by_bit(run, config, "train-dpo", adapters_of=inputs / "model")


@pytest.mark.full
def test_a_run_without_improvement_stops_early(inputs: Path) -> None:
    config = settings(
        inputs,
        "early",
        train={"steps": 20, "global_batch": 4, "optimizer": {"lr": 1e-30}},
        eval={"every_steps": 1, "patience": 2},
        checkpoint={"keep_best": True},
    )
    run = run_in_process(config)
    assert len(metrics(run)) < 20 and "Stopped early" in (run / "report.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "handler", "loss"),
    [
        ("dpo_en_demo.json", "SharegptStylePairwiseHandler", "dpo"),
        ("kto_en_demo.json", "labeled", "kto"),
    ],
)
def test_real_preference_data_trains_at_tp_2_with_packing(
    inputs: Path, name: str, handler: str, loss: str
) -> None:
    rows = json.loads(shared_data("sft", name).read_text())[:40]
    save_model(inputs / "long", tied=False, positions=4096)  # its tokens are bytes
    preprocess(inputs, f"real {loss}", rows, handler)
    config = settings(
        inputs,
        f"real {loss}",
        model={"path": str(inputs / "long")},
        data={
            "train": str(inputs / f"real {loss}"),
            "pack": True,
            "seq_length": 4096,
            "too_long": "drop",
            "eval_fraction": 0.25,
        },
        train={"steps": 3, "global_batch": 2, "parallel": {"tp": 2}},
        algo={"preference": {"loss": loss}},
    )
    steps = metrics(run_in_process(config))
    assert all(math.isfinite(value) for step in steps for value in step.values())
    start = math.log(2) if loss == "dpo" else 0.5
    assert steps[0]["train/loss"] == pytest.approx(start, abs=1e-3)


# --- reward models ---


@pytest.fixture(scope="module")
def reward_run(inputs: Path) -> tuple[Path, dict[str, Any]]:
    config = settings(
        inputs,
        "rm",
        data={"train": str(inputs / "margins")},
        train={"steps": STEPS, "global_batch": 8, "parallel": {"tp": 2}, "optimizer": {"lr": 3e-3}},
        algo={"reward_model": {"center_coef": 0.05}},
        checkpoint=SAVES,
    )
    return run_in_process(config, "train-rm"), config


def pair_scores(model: Any, row: RenderedPreference) -> list[float]:
    """Return the scores of a classifier of transformers for both answers of a pair."""
    scores: list[float] = []
    for side in row.sides:
        end = int(side.loss_mask.nonzero()[0][-1]) + 1
        with torch.no_grad():
            scores.append(model(torch.from_numpy(side.token_ids[:end])[None]).logits.item())
    return scores


@pytest.mark.full
def test_a_reward_model_agrees_with_transformers_after_the_round_trip_and_resumes(
    reward_run: tuple[Path, dict[str, Any]], inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    run, config = reward_run
    for command, load, save in (
        ("hf2mcore", run / "hf", tmp_path / "mcore"),
        ("mcore2hf", tmp_path / "mcore", tmp_path / "hf"),
    ):
        arguments = ["convert-ckpt", command, "--load", str(load), "--save", str(save)]
        succeed(*arguments, log=tmp_path / f"{command}.log")
    rows = held_out(Config.model_validate(config, strict=False))
    model, converted = (
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        for path in (run / "hf", tmp_path / "hf")
    )
    scores = [pair_scores(model, row) for row in rows]
    assert scores == [pair_scores(converted, row) for row in rows]
    chosen, rejected = torch.tensor(scores, dtype=torch.float64).T
    margins = torch.tensor([row.value for row in rows], dtype=torch.float64)
    weight = torch.tensor([row.weight for row in rows], dtype=torch.float64)
    loss = -F.logsigmoid(chosen - rejected - margins) + 0.05 * (chosen + rejected) ** 2
    last = metrics(run)[-1]
    assert last["eval/loss"] == pytest.approx(
        ((loss * weight).sum() / weight.sum()).item(), abs=1e-4
    )
    is_right = (chosen > rejected).double()
    accuracy = ((is_right * weight).sum() / weight.sum()).item()
    assert last["eval/accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert chosen.std() > 0
    assert_resumes_bit_by_bit(run, config, "train-rm")


@pytest.mark.full
def test_adapters_of_a_reward_model_train_beside_its_head_and_resume_bit_by_bit(
    inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    train = {"steps": STEPS, "global_batch": 8, "optimizer": {"lr": 3e-3}, "lora": {"rank": 4}}
    config = settings(inputs, "rm lora", train={**train, "parallel": {"tp": 2}}, checkpoint=SAVES)
    run = run_in_process(config, "train-rm")
    steps = metrics(run)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    single = settings(inputs, "rm lora single", train={**train, "parallel": {"pp": 2}})
    for step, other in zip(steps, metrics(run_in_process(single, "train-rm")), strict=True):
        assert other["train/loss"] == pytest.approx(step["train/loss"], abs=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(run / "hf", dtype=torch.float32)
    rows = held_out(Config.model_validate(config, strict=False))
    scores = torch.tensor([pair_scores(model, row) for row in rows])
    margins, weight = scores[:, 0] - scores[:, 1], torch.tensor([row.weight for row in rows])
    loss = (-F.logsigmoid(margins) * weight).sum() / weight.sum()
    assert steps[-1]["eval/loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert margins.abs().min() > 0
    assert_resumes_bit_by_bit(run, config, "train-rm", adapters_of=inputs / "model")


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "chunked logits"])
def test_curves_of_reward_models_agree_across_layouts(inputs: Path, layout: str) -> None:
    results: list[list[dict[str, float]]] = []
    for name, changes in (("rm single", {}), (f"rm {layout}", LAYOUTS[layout])):
        config = settings(inputs, f"{name} of {layout}", data={"train": str(inputs / "margins")})
        for section, values in changes.items():
            config[section] = {**config[section], **values}
        if "max_tokens_per_micro_batch" in config["train"]:
            del config["train"]["micro_batch"]
        results.append(metrics(run_in_process(config, "train-rm")))
    for step, other in zip(*results, strict=True):
        for key in ("train/loss", "train/margin"):
            assert other[key] == pytest.approx(step[key], abs=1e-5), key


def step_settings(inputs: Path, name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a process reward model on steps that a letter decides."""
    rows = [
        {
            "input": " ".join(f"{'ab'[(i + k) % 2]}{i} #" for k in range(1 + i % 3)),
            "value": ["+-"[(i + k) % 2] for k in range(1 + i % 3)],
        }
        for i in range(24)
    ]
    if not (inputs / "steps_manifest.json").exists():
        source = str(write_rows(inputs / "steps.jsonl", rows))
        arguments = ["preprocess", "--input", source, "--tokenizer", str(inputs / "model")]
        arguments += ["--handler", "steps", "--set", "preprocess.options.placeholder_token='#'"]
        app.app([*arguments, "--output-prefix", str(inputs / "steps")], standalone_mode=False)
    data = {"train": str(inputs / "steps"), **sections.pop("data", {})}
    algo = {"reward_model": {"kind": "process", "reward_tokens": ["+", "-"]}}
    return settings(inputs, name, data=data, algo=algo, **sections)


def step_metrics(model: Any, config: Config) -> tuple[float, float]:
    """Return loss and accuracy of a causal model of transformers on the held-out steps."""
    data = StepDataset(str(config.data.train))
    numbers = split(len(data), config.data.eval_fraction, config.run.seed)[1]
    tokens = [open_tokenizer(str(config.model.path)).token_id(text) for text in "+-"]
    losses: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    for number in numbers:
        (example,) = data[number]
        with torch.no_grad():
            logits = model(torch.from_numpy(example.token_ids)[None]).logits[0].double()
        at = torch.from_numpy(example.loss_mask)
        assert example.labels is not None
        labels = (torch.from_numpy(example.labels)[at] == tokens[1]).long()
        chosen = logits[at][:, tokens]
        losses.append(F.cross_entropy(chosen, labels, reduction="none"))
        right.append((chosen.argmax(-1) == labels).double())
    return torch.cat(losses).mean().item(), torch.cat(right).mean().item()


@pytest.mark.full
def test_a_process_reward_model_learns_steps_agrees_with_transformers_and_resumes(
    inputs: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    train = {"steps": STEPS, "global_batch": 8, "optimizer": {"lr": 3e-3}, "parallel": {"tp": 2}}
    config = step_settings(inputs, "prm", train=train, checkpoint=SAVES)
    run = run_in_process(config, "train-rm")
    steps = metrics(run)
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    loss, accuracy = step_metrics(model, Config.model_validate(config, strict=False))
    assert steps[-1]["eval/loss"] == pytest.approx(loss, abs=1e-4)
    assert steps[-1]["eval/accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert_resumes_bit_by_bit(run, config, "train-rm")


@pytest.mark.full
def test_curves_of_process_reward_models_agree_across_layouts_and_packing(inputs: Path) -> None:
    train = {"steps": STEPS, "global_batch": 4, "optimizer": {"lr": 1e-3}, "micro_batch": 4}
    layouts = {
        "single": {},
        "pp 2": {"parallel": {"pp": 2}, "micro_batch": 2},
        "cp 2": {"parallel": {"cp": 2}},
        "tp 2 sp": {"parallel": {"tp": 2, "sp": True}},
    }
    curves = [
        metrics(
            run_in_process(
                step_settings(inputs, f"prm {name}", train={**train, **changes}), "train-rm"
            )
        )
        for name, changes in layouts.items()
    ]
    for other in curves[1:]:
        for step, another in zip(curves[0], other, strict=True):
            for key in ("train/loss", "train/accuracy"):
                assert another[key] == pytest.approx(step[key], abs=1e-5), key
    data = {"pack": True, "seq_length": 64}
    packed = step_settings(inputs, "prm packed", data=data, train={**train, "lora": {"rank": 4}})
    assert all(
        math.isfinite(step["train/loss"]) for step in metrics(run_in_process(packed, "train-rm"))
    )


@pytest.mark.full
def test_grpo_scores_with_a_trained_reward_model_and_starts_a_critic_from_it(
    reward_run: tuple[Path, dict[str, Any]], inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rewards, _ = reward_run
    rows = [{"instruction": f"{i}+{i}=", "output": str(2 * i)} for i in range(4)]
    preprocess(inputs, "prompts", rows, "r1")
    config = {
        "run": {"name": "grpo", "dir": str(inputs / "runs")},
        "model": {"path": str(inputs / "model"), "dtype": "float32"},
        "data": {"train": str(inputs / "prompts")},
        "cluster": {
            "platform": "cpu",
            "rpc_timeout_s": 300.0,
            "roles": {"critic": {"load": str(rewards / "hf")}},
        },
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 160,
            "max_response_tokens": 8,
            "engine": {"max_num_seqs": 4, "kv_cache_bytes": 1 << 24},
        },
        "algo": {"advantage": {"estimator": "gae"}},
        "reward": {"sources": [{"model": str(rewards / "checkpoints")}]},
        "train": {"steps": 1},
        "log": {"trackers": []},
    }
    file = write_config(tmp_path / "grpo.yaml", config)
    succeed("train-grpo", "-c", str(file), log=tmp_path / "grpo.log")
    (step,) = metrics(inputs / "runs" / "grpo")
    assert math.isfinite(step["train/value_mean"]) and step["train/value_mean"] != 0
    assert math.isfinite(step["reward/reward_model"]) and step["reward/reward_model"] != 0
    model = AutoModelForSequenceClassification.from_pretrained(rewards / "hf", dtype=torch.float32)
    lines = (inputs / "runs" / "grpo" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 4
    tokenizer = AutoTokenizer.from_pretrained(rewards / "hf")
    for row in map(json.loads, lines):
        text = row["response"]  # without special tokens
        if row["finish_reason"] == "stop":
            text += tokenizer.decode(row["response_ids"][-1:])
        with torch.no_grad():
            ids = tokenizer(row["prompt"] + text, return_tensors="pt", add_special_tokens=False)
            score = model(**ids).logits.item()
        assert row["scores"]["reward_model"] == pytest.approx(score, abs=1e-4)
