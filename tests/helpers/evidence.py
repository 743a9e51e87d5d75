"""Evidence of a healthy model and of one injected cause each, as recorded numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from msrl.diagnose.evidence import CacheProbe, Component, Evidence, Logprobs, Recorded
from msrl.types import Floats, SamplingParams

N, T, H, LAYERS, EXPERTS = 400, 40, 16, 3, 4
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
ADAPTED = NAMES[1]
SAMPLING = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9)


def rounding(size: Any, seed: int, scale: float = 1e-5) -> Floats:
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def exact(seed: int = 0, size: Any = N) -> Floats:
    """Return log-probabilities between -4 and 0."""
    return -np.random.default_rng(seed).uniform(0, 4, size).astype(np.float32)


def component(seed: int, **changes: Any) -> Component:
    layers = {
        f"layer {n}": exact(100 + n, (T, H)) + rounding((T, H), seed + n) for n in range(LAYERS)
    }
    chosen = np.sort(
        np.random.default_rng(7).permuted(np.tile(np.arange(EXPERTS), (T, 1)), axis=1)[:, :2]
    )
    values: dict[str, Any] = {
        "dtype": "float32",
        "digests": {name: f"float32 [2] {n}" for n, name in enumerate(NAMES)},
        "settings": {"rope_theta": 10000.0, "head_dim": 32},
        "encodings": {"text": (5, 6, 7), "chat template": (1, 5, 2)},
        "activations": layers,
        "experts": dict.fromkeys(range(LAYERS), chosen),
    }
    return Component(**(values | changes))


def healthy() -> Evidence:
    """Return evidence with temperature 1 and no filters, so that all distributions are equal."""
    raw = exact()
    rows = [raw + rounding(N, seed) for seed in range(10)]
    return Evidence(
        sampling=SamplingParams(max_tokens=64),
        engine=component(20),
        trainer=component(40),
        reference=component(60),
        logprobs=Logprobs(*rows[:9]),
        cache=CacheProbe(raw[:16] + rounding(16, 11), raw[:16]),
        adapted=frozenset({ADAPTED}),
        base_digests={name: f"float32 [2] base {n}" for n, name in enumerate(NAMES)},
        recorded=Recorded(5, 4, rows[0], rows[1]),
    )


def with_engine(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, engine=replace(evidence.engine, **changes))


def with_logprobs(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, logprobs=replace(evidence.logprobs, **changes))


def noisy_engine(evidence: Evidence, scale: float = 0.05) -> Evidence:
    """Return evidence whose engine computes other log-probabilities."""
    noise = rounding(N, 90, scale)
    logprobs = evidence.logprobs
    return with_logprobs(
        evidence,
        sampled=logprobs.sampled + noise,
        engine_together=logprobs.engine_together + noise,
        engine_alone=logprobs.engine_alone + noise,
    )


def with_digest(name: str, value: str) -> Evidence:
    evidence = noisy_engine(healthy())
    return with_engine(evidence, digests={**evidence.engine.digests, name: value})


def lora() -> Evidence:
    return with_digest(ADAPTED, healthy().base_digests[ADAPTED])


def tokenizer() -> Evidence:
    return with_engine(healthy(), encodings={"text": (5, 9, 7)})


def dtype() -> Evidence:
    digests = {name: f"bfloat16 [2] {n}" for n, name in enumerate(NAMES)}
    return with_engine(noisy_engine(healthy(), 0.01), dtype="bfloat16", digests=digests)


def attention() -> Evidence:
    settings = {"rope_theta": 5000.0, "head_dim": 32}
    return with_engine(noisy_engine(healthy()), settings=settings)


def tempered_evidence(**changes: Any) -> Evidence:
    """Return evidence with temperature 0.7 and top-p 0.9 that engine and trainer both apply."""
    evidence = healthy()
    hot = exact(1)
    values = {
        "sampled": hot + rounding(N, 12),
        "trainer": hot + rounding(N, 13),
        "reference_tempered": hot,
        "reference_filtered": hot * np.float32(0.9),
    }
    return with_logprobs(replace(evidence, sampling=SAMPLING), **(values | changes))


def raw_sampling() -> Evidence:
    return tempered_evidence(sampled=exact() + rounding(N, 14))


def filtered_sampling() -> Evidence:
    return tempered_evidence(sampled=exact(1) * np.float32(0.9) + rounding(N, 15))


def prefix_cache() -> Evidence:
    evidence = healthy()
    assert evidence.cache is not None
    stale = replace(evidence.cache, cached=evidence.cache.cached + np.float32(0.5))
    return replace(evidence, cache=stale)


def batch() -> Evidence:
    evidence = healthy()
    together = evidence.logprobs.engine_together + rounding(N, 16, 0.05)
    return with_logprobs(evidence, engine_together=together)


def packing() -> Evidence:
    evidence = healthy()
    packed = evidence.logprobs.trainer_packed + rounding(N, 17, 0.05)
    return with_logprobs(evidence, trainer_packed=packed, trainer=packed)


def from_layer(first: int) -> dict[str, Floats]:
    """Return activations that deviate from a layer on."""
    layers = component(20).activations
    return {
        name: values * np.float32(1.1) if number >= first else values
        for number, (name, values) in enumerate(layers.items())
    }


def router() -> Evidence:
    evidence = healthy()
    other = {n: (rows + (n == 1)) for n, rows in evidence.engine.experts.items()}
    return with_engine(noisy_engine(evidence), experts=other, activations=from_layer(1))


def layer() -> Evidence:
    return with_engine(noisy_engine(healthy()), activations=from_layer(2))


def weights() -> Evidence:
    return with_digest(NAMES[2], "float32 [2] other")


def image() -> Evidence:
    """Return evidence of a vision tower whose features are others, but not its patches."""
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    expected = {"pixels": values, "features": values}
    evidence = healthy()
    return replace(
        evidence,
        trainer=replace(evidence.trainer, image={**expected, "features": values + 1}),
        reference=replace(evidence.reference, image=expected),
    )


CAUSES: dict[str, Callable[[], Evidence]] = {
    "weights": weights,
    "tokenizer": tokenizer,
    "dtype": dtype,
    "sampling": raw_sampling,
    "attention": attention,
    "packing": packing,
    "router": router,
    "image": image,
    "layer": layer,
    "batch": batch,
    "prefix-cache": prefix_cache,
    "lora": lora,
}
