"""Checks of the causes of a mismatch, one pure function each, in the order of the table `CHECKS`.

A check returns the cause, or None. Earlier checks name causes that later ones would notice too:
different weights change every activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from msrl.diagnose.evidence import ENGINE, TRAINER, Component, Evidence
from msrl.diagnose.gap import Gap, healthy_range, measure
from msrl.types import Floats

_MAX_NAMES = 3  # of weights or settings in a cause
_EXACT = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1.5e-1}  # limits of `_error`
_IMAGE_STAGES = {
    "pixels": "preprocessor_config.json and the version of Pillow",
    "features": "the vision tower and its projector",
    "positions": "the rope settings of config.json, and the positions",
}
_MAX_REROUTED = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.2}  # share of (token, layer)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a mismatch.

    Attributes:
        name: Name of the cause.
        where: Component that deviates.
        problem: The deviation, in one sentence.
        remedy: The cure, in one sentence.
    """

    name: str
    where: str
    problem: str
    remedy: str


CheckFunction = Callable[[Evidence], "Cause | None"]


def check_tokenizer(evidence: Evidence) -> Cause | None:
    """Compare the token ids of the same texts, rendered by template and encoded."""
    expected = evidence.reference.encodings
    for where, component in ((ENGINE, evidence.engine), (TRAINER, evidence.trainer)):
        for name, ids in component.encodings.items():
            other = expected.get(name)
            if other is not None and other != ids:
                return Cause(
                    "tokenizer",
                    where,
                    f"{name}: token {_first_difference(ids, other)} of {len(ids)} differs from "
                    "that of the model's own tokenizer and chat template",
                    "Preprocess the data with the template and the tokenizer of the model, or set "
                    "model.tokenizer to the folder that they come from.",
                )
    return None


def check_lora(evidence: Evidence) -> Cause | None:
    """Compare the engine's weights with the base model's, if the trainer has adapters."""
    different = _different_weights(evidence.engine, evidence.trainer)
    unmerged = [
        name
        for name in different
        if name in evidence.adapted
        and evidence.engine.digests.get(name) == evidence.base_digests.get(name)
    ]
    if not unmerged or len(unmerged) < len(different):
        return None
    return Cause(
        "lora",
        ENGINE,
        f"the engine samples with the base weights: {_names(unmerged)} without the trained adapter",
        "Merge the adapter before the weights are loaded (msrl convert-ckpt hf2hf --lora), or load "
        "the folder of the run.",
    )


def check_weights(evidence: Evidence) -> Cause | None:
    """Compare the digests of all weights of equal dtype."""
    different = _different_weights(evidence.engine, evidence.trainer)
    if different:
        expected = evidence.reference.digests
        trained = evidence.trainer.digests
        is_trainer = any(
            name in expected and trained.get(name) != expected[name] for name in different
        )
        return _weights_finding(TRAINER if is_trainer else ENGINE, different)
    different = _different_weights(evidence.trainer, evidence.reference)
    if different:
        return _weights_finding(TRAINER, different)
    return None


def _weights_finding(where: str, names: list[str]) -> Cause:
    return Cause(
        "weights",
        where,
        f"{_names(names)} with other bits than in the checkpoint",
        "Load the weights again. In training, set rollout.weights.verify=every, which ends the run "
        "with the name of the tensor.",
    )


def check_recorded(evidence: Evidence) -> Cause | None:
    """Compare recorded log-probabilities with the version that the record names."""
    recorded = evidence.recorded
    if recorded is None:
        return None
    gap = measure(recorded.behavior, recorded.trainer)
    is_healthy_now = not _differs(evidence, evidence.logprobs.sampled, evidence.logprobs.trainer)
    if not gap.exceeds(evidence.limits) or not is_healthy_now:
        return None
    return Cause(
        "weights",
        ENGINE,
        f"the tokens of step {recorded.step} were not sampled by version {recorded.version}, which "
        f"the rollout record names ({_text(gap)}), although the engine agrees with the trainer now",
        "Set rollout.weights.verify=every, and compare the versions of the record.",
    )


def check_dtype(evidence: Evidence) -> Cause | None:
    """Compare the dtypes of the computations."""
    engine, trainer = evidence.engine, evidence.trainer
    logprobs = evidence.logprobs
    if engine.cache_dtype not in (None, engine.dtype):
        dtype, key = engine.cache_dtype, "rollout.engine.options.kv_cache_dtype"
    elif engine.dtype != trainer.dtype:
        dtype, key = engine.dtype, "model.dtype"
    else:
        return None
    if not measure(logprobs.engine_alone, logprobs.trainer_alone).exceeds(healthy_range("float32")):
        return None
    return Cause(
        "dtype",
        ENGINE,
        f"the engine computes with {dtype}, the trainer with {trainer.dtype}",
        f"Use one dtype for both ({key}).",
    )


def check_attention(evidence: Evidence) -> Cause | None:
    """Compare the settings of attention, RoPE and router that each component reads."""
    expected = evidence.reference.settings
    for where, component in ((ENGINE, evidence.engine), (TRAINER, evidence.trainer)):
        settings = component.settings
        names = [name for name in settings.keys() & expected if settings[name] != expected[name]]
        if names:
            rows = [f"{n}={settings[n]} instead of {expected[n]}" for n in sorted(names)]
            return Cause(
                "attention",
                where,
                f"computes with {', '.join(rows[:_MAX_NAMES])}",
                "Restore config.json of the model, or remove the option that overrides it.",
            )
    return None


def check_sampling(evidence: Evidence) -> Cause | None:
    """Find the distribution that the engine's log-probabilities belong to."""
    logprobs, sampling = evidence.logprobs, evidence.sampling
    if not _differs(evidence, logprobs.sampled, logprobs.trainer):
        return None
    is_raw = not _differs(evidence, logprobs.sampled, logprobs.reference)
    if is_raw and _differs(evidence, logprobs.reference, logprobs.reference_tempered):
        return Cause(
            "sampling",
            ENGINE,
            "the engine reports raw log-probabilities, the trainer those of temperature "
            f"{sampling.temperature:g}",
            "Let the engine report processed log-probabilities "
            "(logprobs_mode=processed_logprobs), or sample with temperature 1.",
        )
    is_filtered = not _differs(evidence, logprobs.sampled, logprobs.reference_filtered)
    if is_filtered and _differs(evidence, logprobs.reference_tempered, logprobs.reference_filtered):
        return Cause(
            "sampling",
            ENGINE,
            f"the engine samples with {_filters(evidence)}, after which its probabilities are "
            "normalized again; the trainer scores the distribution without filters",
            "Set rollout.sampling.top_p=1, top_k=-1 and min_p=0, or correct for the difference "
            "with algo.mismatch.weight=token.",
        )
    is_raw_trainer = not _differs(evidence, logprobs.trainer, logprobs.reference)
    is_tempered = not _differs(evidence, logprobs.sampled, logprobs.reference_tempered)
    if is_raw_trainer and is_tempered:
        return Cause(
            "sampling",
            TRAINER,
            f"the engine samples with temperature {sampling.temperature:g}, the trainer scores "
            "with temperature 1",
            "Use the temperature of rollout.sampling for both.",
        )
    return None


def check_prefix_cache(evidence: Evidence) -> Cause | None:
    """Compare tokens that were sampled with cached prefixes with a prefill without the cache."""
    probe = evidence.cache
    if probe is None:
        return None
    gap = measure(probe.cached, probe.recomputed)
    if not gap.exceeds(evidence.limits):
        return None
    return Cause(
        "prefix-cache",
        ENGINE,
        f"cached keys and values of earlier weights are used after an update ({_text(gap)})",
        "Reset the prefix cache with every update, or set rollout.engine.prefix_cache=false.",
    )


def check_batch(evidence: Evidence) -> Cause | None:
    """Compare sequences that the engine computes together and one at a time."""
    logprobs = evidence.logprobs
    gap = measure(logprobs.engine_together, logprobs.engine_alone)
    if not gap.exceeds(evidence.limits):
        return None
    return Cause(
        "batch",
        ENGINE,
        f"the log-probabilities of a sequence depend on the other sequences of its batch "
        f"({_text(gap)})",
        "Use batch-invariant kernels (VLLM_BATCH_INVARIANT=1), or lower "
        "rollout.engine.max_num_seqs.",
    )


def check_packing(evidence: Evidence) -> Cause | None:
    """Compare sequences that ranks compute packed and one at a time."""
    logprobs = evidence.logprobs
    gap = measure(logprobs.trainer_packed, logprobs.trainer_alone)
    if not gap.exceeds(evidence.limits):
        return None
    return Cause(
        "packing",
        TRAINER,
        "the log-probabilities of a sequence depend on the sequences that are packed with it "
        f"({_text(gap)}): its positions do not begin at 0, or it attends to another sequence",
        "Set train.micro_batch=1 and train.max_tokens_per_micro_batch=null, and report the "
        "attention kernel of the trainer.",
    )


def check_router(evidence: Evidence) -> Cause | None:
    """Compare the experts that engine and trainer route each token to."""
    engine, trainer = evidence.engine.experts, evidence.trainer.experts
    layers = sorted(engine.keys() & trainer.keys())
    if not layers or not _scores_differ(evidence):
        return None
    shares = {layer: _rerouted_share(evidence, layer) for layer in layers}
    limit = max(_MAX_REROUTED[evidence.engine.dtype], _MAX_REROUTED[evidence.trainer.dtype])
    first = next((layer for layer in layers if shares[layer] > limit), None)
    if first is None or _precedes(evidence, first):
        return None
    return Cause(
        "router",
        ENGINE,
        f"layer {first} routes {shares[first]:.0%} of the tokens to other experts than the trainer "
        f"(limit {limit:.0%})",
        "Compute the router in float32 on both sides, and check its bias and its groups.",
    )


def check_image(evidence: Evidence) -> Cause | None:
    """Find the first stage of an image whose values deviate from transformers' values.

    Without these, the engine's values are compared with the trainer's.
    """
    expected = {**evidence.trainer.image, **evidence.reference.image}
    for where, component in ((TRAINER, evidence.trainer), (ENGINE, evidence.engine)):
        for name, values in component.image.items():
            error = _error(values, expected[name]) if name in expected else 0.0
            if not error <= _EXACT[component.dtype]:
                other = "transformers" if name in evidence.reference.image else "the trainer"
                return Cause(
                    "image",
                    where,
                    f"{name} of an image are the first that deviate from those of {other} "
                    f"(relative error {error:.1e})",
                    f"Compare {_IMAGE_STAGES.get(name, 'this block of the vision tower')} in the "
                    f"{where} with {other}.",
                )
    return None


def check_layer(evidence: Evidence) -> Cause | None:
    """Find the first layer whose output deviates from transformers' output."""
    if not _scores_differ(evidence):
        return None
    deviations: list[tuple[int, str, str, float]] = []
    for where, component in ((ENGINE, evidence.engine), (TRAINER, evidence.trainer)):
        deviation = _first_deviation(component, evidence.reference)
        if deviation is not None:
            deviations.append((deviation[0], where, deviation[1], deviation[2]))
    if not deviations:
        return None
    _, where, name, error = min(deviations)
    return Cause(
        "layer",
        where,
        f"{name} is the first whose output deviates from that of transformers (relative error "
        f"{error:.1e})",
        f"Compare the implementation of this layer in the {where} with transformers, sublayer by "
        "sublayer.",
    )


CHECKS: Mapping[str, CheckFunction] = {
    "tokenizer": check_tokenizer,
    "lora": check_lora,
    "weights": check_weights,
    "attention": check_attention,
    "dtype": check_dtype,
    "prefix-cache": check_prefix_cache,
    "batch": check_batch,
    "packing": check_packing,
    "router": check_router,
    "image": check_image,
    "layer": check_layer,
    "sampling": check_sampling,
    "recorded": check_recorded,
}
"""Checks in the order in which they are made."""


def _differs(evidence: Evidence, left: Floats, right: Floats) -> bool:
    return measure(left, right).exceeds(evidence.limits)


def _scores_differ(evidence: Evidence) -> bool:
    """Return True if raw log-probabilities of one sequence at a time differ between components."""
    logprobs = evidence.logprobs
    pairs = (
        (logprobs.engine_alone, logprobs.trainer_alone),
        (logprobs.engine_alone, logprobs.reference),
        (logprobs.trainer_alone, logprobs.reference),
    )
    return any(_differs(evidence, left, right) for left, right in pairs) or _is_inexact(evidence)


def _is_inexact(evidence: Evidence) -> bool:
    """Return True if the ranks differ from transformers where neither rounds."""
    wide = evidence.logprobs.trainer_in_float32
    if wide is None:
        return False
    return measure(wide, evidence.logprobs.reference).exceeds(healthy_range("float32"))


def _different_weights(left: Component, right: Component) -> list[str]:
    """Return the names of weights with different digests; weights of other dtypes are skipped."""
    if not left.digests or not right.digests or left.dtype != right.dtype:
        return []
    names = left.digests.keys() | right.digests.keys()
    return sorted(name for name in names if left.digests.get(name) != right.digests.get(name))


def _first_difference(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ids, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(other)))


def _names(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {more} more weights" if more > 0 else shown


def _filters(evidence: Evidence) -> str:
    sampling = evidence.sampling
    filters = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
        "min_p": (sampling.min_p, 0.0),
    }
    set_filters = [f"{name}={value:g}" for name, (value, off) in filters.items() if value != off]
    return ", ".join(set_filters) or f"temperature {sampling.temperature:g}"


def _rerouted_share(evidence: Evidence, layer: int) -> float:
    """Return the share of tokens whose sets of experts differ."""
    engine, trainer = evidence.engine.experts[layer], evidence.trainer.experts[layer]
    return float((engine != trainer).any(axis=1).mean())


def _precedes(evidence: Evidence, layer: int) -> bool:
    """Return True if the output of a layer before `layer` deviates already."""
    deviations = (
        _first_deviation(component, evidence.reference)
        for component in (evidence.engine, evidence.trainer)
    )
    return any(deviation is not None and deviation[0] < layer for deviation in deviations)


def _first_deviation(component: Component, reference: Component) -> tuple[int, str, float] | None:
    """Return number, name and relative error of the first activation that deviates."""
    limit = _EXACT[component.dtype]
    for number, (name, values) in enumerate(component.activations.items()):
        if name in reference.activations:
            error = _error(values, reference.activations[name])
            if not error <= limit:
                return number, name, error
    return None


def _error(
    values: Floats,  # [T, H]
    expected: Floats,  # [T, H]
) -> float:
    """Return the norm of the difference relative to the norm of the expected values."""
    scale = float(np.linalg.norm(np.asarray(expected, np.float64)))
    difference = np.asarray(values, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference)) / max(scale, 1e-30)


def _text(gap: Gap) -> str:
    return f"mean {gap.mean:.1e}, maximum {gap.largest:.1e} nats"
