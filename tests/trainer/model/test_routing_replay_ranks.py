"""Routing replay of complete models: on one rank, and in the full tests in all layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import families
from mixture_families import DEEPSEEK_V3, QWEN3_MOE
from msrl.algorithms.packing import Sequences
from msrl.config.sections.train import RecomputeConfig
from msrl.platforms import get
from msrl.trainer.launch import run_ranks
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.settings import Layout
from msrl.types import Routes
from replay_ranks import Replay, ReplayResult
from support import python_path
from training_ranks import sequences

pytestmark = [pytest.mark.slow, pytest.mark.full]
FULL = {"recompute": RecomputeConfig(granularity="full")}
EXPERTS = {"recompute": RecomputeConfig(granularity="selective", modules=("moe",))}
# The first layers have no experts, so mixture layers have other numbers than layers.
DENSE_FIRST = {**DEEPSEEK_V3, "first_k_dense_replace": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"layout": Layout(ep=2)},
    "dp2 ep2": {"layout": Layout(ep=2), "dp": 2, "forward_limits": BatchLimits(1)},
    "tp2 ep2 etp1": {"layout": Layout(tp=2, ep=2, etp=1), "limits": BatchLimits(2)},
    "tp2 cp2, recompute": {"layout": Layout(tp=2, cp=2), "more": FULL},
    "cp2 ep2, recompute of experts": {"layout": Layout(cp=2, ep=2), "more": EXPERTS},
    "pp2 ep2": {"layout": Layout(pp=2, ep=2), "limits": BatchLimits(2)},
    "pp2 vpp1 ep2, recompute": {
        "layout": Layout(pp=2, vpp=1, ep=2),
        "forward_limits": BatchLimits(3),
        "limits": BatchLimits(2),
        "more": FULL,
    },
    "pp2 ep2, empty layers": {"layout": Layout(pp=2, ep=2, noop_layers=(0, 3))},
}


def _run(cases: list[Replay]) -> dict[str, ReplayResult]:
    results = run_ranks(
        "replay_ranks:main",
        cases,
        num_ranks=max(case.world for case in cases),
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in results}


def _assert_same(actual: ReplayResult, expected: ReplayResult) -> None:
    """Assert that two runs recorded and replayed the same routes."""
    for routes, expected_routes in zip(actual.routes, expected.routes, strict=True):
        np.testing.assert_array_equal(routes, expected_routes)
    for values, expected_values in zip(actual.replayed, expected.replayed, strict=True):
        np.testing.assert_allclose(values, expected_values, rtol=0, atol=1e-4)
    for report, expected_report in zip(actual.reports, expected.reports, strict=True):
        share = expected_report["router_disagreement"]
        assert report["router_disagreement"] == pytest.approx(share, abs=0.01)
        assert report["loss"] == pytest.approx(expected_report["loss"], rel=1e-4, abs=1e-6)
    for name, gradient in expected.gradients.items():
        scale = float(np.abs(gradient).max())
        np.testing.assert_allclose(
            actual.gradients[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-9, err_msg=name
        )


def test_updates_replay_the_routes_of_the_old_logprobs_whatever_the_micro_batches(tmp_path: Path):
    model = families.save_model(tmp_path / "qwen", QWEN3_MOE)
    by_tokens, one_by_one = BatchLimits(8, max_tokens=64), BatchLimits(1)
    results = _run(
        [
            Replay("base", model),
            Replay("by tokens", model, forward_limits=BatchLimits(3), limits=by_tokens, more=FULL),
            Replay("one by one", model, limits=one_by_one, more={**EXPERTS, "logit_chunk": 5}),
            Replay("own choice", model, replays=False),
        ]
    )
    base, own_choice = results["base"], results["own choice"]
    for logprobs, routes in zip(base.logprobs, base.routes, strict=True):
        assert routes.shape == (len(logprobs), QWEN3_MOE["num_hidden_layers"], 3)
        assert routes.dtype == np.uint8
    first, second = (report["router_disagreement"] for report in base.reports)
    assert first == 0
    assert 0 < second < 1
    for name in ("by tokens", "one by one"):
        _assert_same(results[name], base)
    routers = [name for name in base.gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == QWEN3_MOE["num_hidden_layers"]
    for name in routers:
        assert np.abs(base.gradients[name]).max() > 0
        assert not np.allclose(base.gradients[name], own_choice.gradients[name], rtol=1e-2)
    assert own_choice.reports[1]["router_disagreement"] == 0
    for result in results.values():
        for values, recorded in zip(result.replayed, result.logprobs, strict=True):
            np.testing.assert_allclose(values, recorded, rtol=0, atol=1e-5)


def _random_routes(batch: Sequences, num_layers: int) -> tuple[Routes, ...]:
    """Return routes without the last token, as an engine records them, [T - 1, L, 3]."""
    random = np.random.default_rng(3)
    routes: list[Routes] = []
    for ids in batch.token_ids:
        ranks = random.random((len(ids) - 1, num_layers, QWEN3_MOE["num_experts"])).argsort(-1)
        routes.append(ranks[:, :, :3].astype(np.uint8))
    return tuple(routes)


def test_routes_of_an_engine_are_replayed_in_every_layout(tmp_path: Path):
    model = families.save_model(tmp_path / "qwen", QWEN3_MOE)
    batch = sequences(0, with_fields=True)
    # A sequence without a response, as after the failure of an environment, has no routes.
    masks = (np.zeros_like(batch.loss_masks[0]), *batch.loss_masks[1:])
    routes = _random_routes(batch, QWEN3_MOE["num_hidden_layers"])
    arguments = {"batch": batch._replace(loss_masks=masks), "routes": (routes[0][:0], *routes[1:])}
    names = ("dp2 ep2", "tp2 cp2, recompute", "pp2 vpp1 ep2, recompute")
    results = _run(
        [
            Replay("base", model, **arguments),
            Replay("one by one", model, limits=BatchLimits(1), more=FULL, **arguments),
            *(Replay(name, model, **LAYOUTS[name], **arguments) for name in names),
        ]
    )
    base = results["base"]
    assert base.reports[0]["router_disagreement"] > 0.5
    changes = [
        np.abs(values - own).max()
        for values, own in zip(base.replayed[1:], base.logprobs[1:], strict=True)
    ]
    assert min(changes) > 1e-3
    for name in ("one by one", *names):
        _assert_same(results[name], base)


@pytest.mark.parametrize("config", [QWEN3_MOE, DENSE_FIRST], ids=["qwen3 moe", "deepseek v3"])
def test_routes_are_the_same_in_every_layout(tmp_path: Path, config: dict[str, Any]):
    folder = families.save_model(tmp_path / "model", config)
    layouts = [Replay(name, folder, **settings) for name, settings in LAYOUTS.items()]
    results = _run([Replay("base", folder), *layouts])
    assert 0 < results["base"].reports[1]["router_disagreement"] < 1
    for name in LAYOUTS:
        _assert_same(results[name], results["base"])
