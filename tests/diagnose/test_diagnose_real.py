"""Causes of a mismatch injected into a real engine and real ranks, which share a small mixture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import families
import tiny_qwen2
from diagnose_workers import FaultyWorker
from mixture_families import QWEN3_MOE
from msrl.cli.configuration import load_configuration
from msrl.config.sections.train import OptimizerConfig
from msrl.diagnose.checks import Cause
from msrl.diagnose.verdict import Verdict, judge
from msrl.platforms import get
from msrl.workflows.diagnose.collect import compare, open_engine, open_ranks
from msrl.workflows.diagnose.target import Target, open_target
from msrl.workflows.engine import choose_renderer, hf_weights
from msrl.workflows.training.trainer_group import TrainerGroup
from support import assert_mentions, python_path

pytestmark = pytest.mark.slow

SETTINGS = (
    "model.dtype=float32",
    "rollout.max_prompt_tokens=400",
    "rollout.max_response_tokens=12",
    "rollout.engine.max_num_seqs=8",
    "train.lora.rank=2",
    "train.lora.targets=[linear_qkv, linear_proj]",
)


@dataclass(frozen=True)
class Running:
    """A target with its engine and its ranks."""

    target: Target
    trainers: TrainerGroup
    engine: Any

    def verdict(self, **changes: Any) -> Verdict:
        """Return the verdict on the target after changes of its fields."""
        return judge(compare(replace(self.target, **changes), self.trainers, self.engine))

    def cause(self, **changes: Any) -> Cause:
        cause = self.verdict(**changes).cause
        assert cause is not None
        return cause

    @property
    def model(self) -> Any:
        """The engine's model, which runs in this process."""
        worker = self.engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        return worker.worker.model_runner.get_model()


def save_mixture(folder: Path) -> Path:
    """Save a small Qwen3 mixture with a byte-level tokenizer."""
    config = {
        **QWEN3_MOE,
        "hidden_size": 128,
        "vocab_size": tiny_qwen2.VOCAB_SIZE,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = families.weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_qwen2.make_tokenizer().save_pretrained(folder)
    return folder


def make_target(folder: Path, *sets: str) -> Target:
    config = load_configuration(sets=[f"model.path={folder}", *SETTINGS, *sets]).config
    target = open_target(config, "cpu", None)
    policy = target.settings.policy
    assert policy is not None
    with_adapters = replace(policy, optimizer=OptimizerConfig(), lora=config.train.lora)
    settings = replace(target.settings, policy=with_adapters)
    return replace(target, settings=settings, prompts=target.prompts[:4])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target = make_target(save_mixture(tmp_path_factory.mktemp("model")))
    platform = get("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())  # the ranks import FaultyWorker
        with (
            open_ranks(target, platform, FaultyWorker) as trainers,
            open_engine(target, platform) as engine,
        ):
            yield Running(target, trainers, engine)


@contextmanager
def rank_fault(running: Running, name: str) -> Iterator[None]:
    running.trainers.workers.call("set_fault", name)
    try:
        yield
    finally:
        running.trainers.workers.call("set_fault", "")


@contextmanager
def loading(
    running: Running, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Change tensors on their way into the engine."""
    load = running.engine.load_weights

    def changed(tensors: Any, *, verify: bool = False) -> Any:
        return load(((name, change(name, tensor)) for name, tensor in tensors), verify=verify)

    running.engine.load_weights = changed
    try:
        yield
    finally:
        running.engine.load_weights = load


@contextmanager
def hook(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change the outputs of a module of the engine."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: change(output))
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.full
def test_a_healthy_model_has_no_cause_and_a_changed_weight_is_named(running: Running) -> None:
    verdict = running.verdict()
    assert verdict.cause is None, verdict
    assert all(each.gap.num_tokens for each in verdict.comparisons)
    name = "model.layers.1.self_attn.o_proj.weight"

    def change(own: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.5 if own == name else tensor

    with loading(running, change):
        cause = running.cause()
    assert (cause.name, cause.where) == ("weights", "engine")
    assert_mentions(cause.problem, name)


@pytest.mark.full
def test_another_tokenizer_is_named(running: Running, tmp_path: Path) -> None:
    tiny_qwen2.make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    vocab = contents["model"]["vocab"]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]
    path.write_text(json.dumps(contents))
    cause = running.cause(reference_dir=tmp_path)
    assert cause.name == "tokenizer"
    assert_mentions(cause.problem, "English")


@pytest.mark.full
def test_another_template_is_named(running: Running) -> None:
    folder = running.target.plan.model.hf_dir
    cause = running.cause(renderer=choose_renderer(folder, "alpaca"))
    assert cause.name == "tokenizer"
    assert_mentions(cause.problem, "template")


@pytest.mark.full
@pytest.mark.parametrize("options", [{"temperature": 0.6, "top_p": 0.8}, {"top_k": 3}])
def test_filters_of_sampling_are_named(running: Running, options: Mapping[str, Any]) -> None:
    cause = running.cause(sampling=replace(running.target.sampling, **options))
    assert cause.name == "sampling"
    assert_mentions(cause.problem, *(name for name in options if name != "temperature"))


@pytest.mark.full
def test_a_temperature_alone_is_healthy(running: Running) -> None:
    assert running.verdict(sampling=replace(running.target.sampling, temperature=0.6)).cause is None


@pytest.mark.full
def test_another_rotary_base_of_the_ranks_is_named(running: Running) -> None:
    with rank_fault(running, "rope"):
        cause = running.cause()
    assert (cause.name, cause.where) == ("attention", "trainer")
    assert_mentions(cause.problem, "rotary.theta=500.0 instead of 1000000.0")


@pytest.mark.full
def test_positions_that_go_on_in_the_next_packed_sequence_are_named(running: Running) -> None:
    with rank_fault(running, "boundaries"):
        cause = running.cause()
    assert (cause.name, cause.where) == ("packing", "trainer")


@pytest.mark.full
def test_another_choice_of_experts_is_named(running: Running) -> None:
    def change(output: Any) -> Any:
        logits, *routes = output
        return (logits.roll(1, dims=-1), *routes)

    with hook(running.model.model.layers[1].mlp.gate, change):
        cause = running.cause()
    assert cause.name == "router"
    assert_mentions(cause.problem, "layer 1")


@pytest.mark.full
def test_the_first_layer_that_deviates_is_named(running: Running) -> None:
    def change(output: Any) -> Any:
        hidden, residual = output
        return hidden * 1.3, residual

    with hook(running.model.model.layers[1], change):
        cause = running.cause()
    assert (cause.name, cause.where) == ("layer", "engine")
    assert_mentions(cause.problem, "layer 1")


@pytest.mark.full
def test_an_engine_whose_results_depend_on_the_batch_is_named(running: Running) -> None:
    def change(output: Any) -> Any:
        hidden, residual = output
        # All sequences together have so many tokens; one has fewer, and the probes have more.
        is_batch = 200 < len(hidden) < 900
        return (hidden * 1.3 if is_batch else hidden), residual

    with hook(running.model.model.layers[0], change):
        cause = running.cause()
    assert (cause.name, cause.where) == ("batch", "engine")


@pytest.mark.full
def test_keys_of_earlier_weights_in_the_prefix_cache_are_named(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = running.engine
    load, forget = engine.load_weights, engine.forget_prompts

    def load_without_reset(tensors: Any, *, verify: bool = False) -> Any:
        engine.forget_prompts = lambda: None
        digests = load(tensors, verify=verify)
        engine.forget_prompts = forget
        return digests

    monkeypatch.setattr(engine, "load_weights", load_without_reset)
    # The cache of the last test holds keys of the same weights, so these are other ones.
    shaken = {name: tensor * 1.5 for name, tensor in hf_weights(running.target.source)}
    load(shaken.items())
    cause = running.cause()
    assert (cause.name, cause.where) == ("prefix-cache", "engine")


@pytest.mark.full
def test_an_adapter_that_is_not_merged_is_named(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = running.target.source
    load = running.engine.load_weights

    def load_base(tensors: Any, *, verify: bool = False) -> Any:
        for _ in tensors:
            pass
        return load(hf_weights(base), verify=verify)

    monkeypatch.setattr(running.engine, "load_weights", load_base)
    adapted = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight"
        for layer in range(running.target.plan.shape.num_layers)
        for name in "qkvo"
    }
    with rank_fault(running, "adapter"):
        cause = running.cause(base=base, adapted=frozenset(adapted))
    assert (cause.name, cause.where) == ("lora", "engine")
