"""Predicted seconds against hand calculations, with a profile of round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from mixture_families import QWEN3_MOE
from msrl.config.sections.train import ParallelConfig, RecomputeConfig, TrainConfig
from msrl.layouts.cost import CostModel, Job, Lengths
from msrl.layouts.profile import Profile, Speeds
from msrl.memory.flops import training_flops
from test_models import QWEN2, shape


def profile(**changes: float) -> Profile:
    """Return a device without latency, whose products and bandwidths are as fast as possible."""
    figures = {
        "memory_bytes": 1e12,
        "memory_bytes_per_s": 1e30,
        "link_bytes_per_s": 1e30,
        "network_bytes_per_s": 1e30,
        "host_bytes_per_s": 1e30,
        "kernel_s": 1e-30,
        "collective_s": 1e-30,
        "engine_step_s": 1e-30,
        **changes,
    }
    shares = ("products", "experts", "attention", "memory", "links", "network")
    return Profile.model_validate(
        {
            "title": "round numbers",
            "platform": "cuda",
            "is_measured": False,
            "peak_flops": {"bfloat16": {"value": 1e9, "source": "test"}},
            "efficiency": {name: {"value": 1.0, "source": "test"} for name in shares},
            **{name: {"value": value, "source": "test"} for name, value in figures.items()},
        }
    )


def job(device: Profile, config: dict = QWEN2, ranks: int = 1, rows: int = 8, **changes) -> Job:
    model = shape(config)
    length = Lengths(row=16, sequence=16, trained_share=1.0, note="")
    values = {"shape": model, "profile": device, "lengths": length, "dtype": "bfloat16"}
    values |= {"logits_bytes": 2, "world_size": ranks, "devices_per_node": 4, "rows": rows}
    return Job(**{**values, "overlaps": False, "is_queued": True, **changes})


def train(micro_batch: int = 1, recompute: str = "none", **sizes) -> TrainConfig:
    return TrainConfig(
        micro_batch=micro_batch,
        parallel=ParallelConfig(**sizes),
        recompute=RecomputeConfig(granularity=recompute),
    )


def deep(config: dict, layers: int) -> dict:
    return {**config, "num_hidden_layers": layers}


@pytest.mark.parametrize("config", [QWEN2, QWEN3_MOE])
def test_products_take_their_flops_at_the_peak(config: dict):
    work = job(profile(), config)
    parts = CostModel(work).update(train()).parts
    flops = training_flops(work.shape, [16] * 8, 8 * 16)
    attention = parts["attention"] * 3 / 3.5  # the kernels compute scores again
    assert parts["matrix products"] + attention == pytest.approx(flops / 1e9)
    assert sum(parts.values()) == pytest.approx(parts["matrix products"] + parts["attention"])


def test_full_recomputation_repeats_the_forward_pass_of_the_layers():
    model = CostModel(job(profile()))
    once, again = (model.update(train(recompute=kind)) for kind in ("none", "full"))
    head = 2 * 8 * 16 * model._job.shape.hidden_size * model._job.shape.vocab_size / 1e9
    layers = once.parts["matrix products"] / 3 - head + once.parts["attention"] / 3.5
    assert again.parts["recomputation"] == pytest.approx(layers)


def test_tensor_parallel_ranks_share_products_and_heads():
    parts = [
        CostModel(job(profile(), ranks=tp)).update(train(tp=tp, sp=tp > 1)).parts for tp in (1, 2)
    ]
    for name in ("matrix products", "attention"):
        assert parts[0][name] == pytest.approx(2 * parts[1][name])


def test_bubbles_follow_the_formula_of_the_schedules():
    # arXiv:2104.04473, section 2.2: (p - 1) (f + b) of a stage, divided by the virtual stages.
    work = dataclasses.replace(job(profile(), deep(QWEN2, 8), ranks=4), shape=_headless(8))
    model = CostModel(work)
    plain, virtual = model.update(train(pp=4)), model.update(train(pp=4, vpp=1))
    of_a_stage = (plain.parts["matrix products"] + plain.parts["attention"]) / 8
    assert plain.parts["pipeline bubbles"] == pytest.approx(3 * of_a_stage, rel=2e-3)
    assert virtual.parts["pipeline bubbles"] == pytest.approx(3 * of_a_stage / 2, rel=2e-3)


def _headless(layers: int):
    """Return a model whose output layer has one output, so that stages are nearly equal."""
    return dataclasses.replace(shape(deep(QWEN2, layers)), reward_head=True)


def test_tensor_parallelism_waits_for_links_and_between_machines_for_the_network():
    device = profile(link_bytes_per_s=1e6, network_bytes_per_s=1e3)
    inside = CostModel(job(device, ranks=2)).update(train(tp=2, sp=True))
    across = CostModel(job(device, ranks=2, devices_per_node=1)).update(train(tp=2, sp=True))
    shapes = shape(QWEN2)
    # 2 gathers and 2 scatters forward, 2 gathers backward; the others hide behind products.
    size = 16 * shapes.hidden_size * 2 / 2
    least = 8 * shapes.num_layers * 6 * size
    assert inside.parts["TP communication"] >= least / 1e6 * 0.999
    assert across.parts["TP communication"] >= least / 1e3 * 0.999
    assert across.parts["TP communication"] > 100 * inside.parts["TP communication"]


def test_gradients_and_weights_of_copies_are_exchanged_once_per_update():
    device = profile(network_bytes_per_s=1e6)
    work = job(device, ranks=2, devices_per_node=1)
    model = work.shape
    weights = sum(
        2 * model.hidden_size * (model.attention.num_heads + model.attention.num_groups)
        * model.attention.head_dim
        + 3 * model.hidden_size * model.ffn_hidden_size
        for _ in model.layers
    )  # fmt: skip
    weights += model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    seconds = CostModel(work).update(train()).parts["DP communication"]
    assert seconds == pytest.approx(weights * (4 + 2) / 2 / 1e6)
    hidden = CostModel(dataclasses.replace(work, overlaps=True)).update(train())
    assert hidden.parts["DP communication"] < seconds


def test_small_micro_batches_wait_for_the_host():
    model = CostModel(job(profile(kernel_s=1.0)))
    assert model.update(train(1)).parts["host"] == pytest.approx(
        8 * model.update(train(8)).parts["host"], rel=1e-3
    )


def test_tokens_travel_to_experts_of_other_ranks_and_back():
    device = profile(link_bytes_per_s=1e6)
    work = job(device, QWEN3_MOE, ranks=2)
    moe = work.shape.moe
    assert moe is not None
    parts = CostModel(work).update(train(ep=2)).parts
    routed = 16 * moe.experts_per_token * work.shape.hidden_size * 2  # bytes of a micro-batch
    layers = sum(work.shape.mixture_layers)
    # Half of them are of the other rank; there and back, forward and backward; 4 micro-batches.
    assert parts["EP communication"] == pytest.approx(4 * layers * 4 * routed / 2 / 1e6)


def test_speeds_of_a_measured_profile_depend_on_sizes():
    device = profile()
    speeds = Speeds(
        products={"bfloat16": ((16.0, 1.0, 1e6), (32.0, 1.0, 2e6))},
        attention=((16.0, 1e9),),
        gather=((2.0, 1.0, 1e3),),
    )
    measured = device.model_copy(update={"speeds": speeds})
    single, double = (
        CostModel(job(measured)).update(train(size)).parts["matrix products"] for size in (1, 2)
    )
    assert single == pytest.approx(2 * double)  # twice the tokens at twice the speed
    parts = [CostModel(job(own, ranks=2)).update(train(tp=2)).parts for own in (device, measured)]
    assert parts[1]["TP communication"] > 1 > parts[0]["TP communication"]


def test_a_host_that_computes_itself_adds_the_time_of_its_calls():
    device = profile(kernel_s=1e-3)
    queued, alone = (
        CostModel(job(device, is_queued=flag)).update(train()) for flag in (True, False)
    )
    layers = job(device).shape.num_layers
    assert alone.parts["host"] == pytest.approx(8 * layers * 2.5 * 40 * 1e-3)
    assert alone.parts["host"] > queued.parts["host"]


def test_seconds_of_passes_and_updates_are_added_once_each():
    device = profile()
    fixed = {"pass_s": {"value": 3.0, "source": "x"}, "update_s": {"value": 5.0, "source": "x"}}
    device = Profile.model_validate({**device.model_dump(exclude_none=True), **fixed})
    assert CostModel(job(device)).update(train(2)).parts["host"] == pytest.approx(4 * 3 + 5)
