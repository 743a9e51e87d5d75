"""Evidence about a model: the same tokens sampled and scored by engine, ranks and transformers.

N response tokens of all sequences, T tokens of a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.diagnose.evidence import CacheProbe, Component, Evidence, Logprobs, Recorded
from msrl.diagnose.recorder import by_layer
from msrl.errors import MsrlError
from msrl.plan.derived import world_size
from msrl.platforms.base import Platform
from msrl.rollout.weights.digest import Digests, add_digests, differences, file_digests
from msrl.tracking.progress import progress
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import Floats, Ints, Prompt, SamplingParams
from msrl.workflows.diagnose import reference
from msrl.workflows.diagnose.encodings import folder_encodings, rendered_encodings
from msrl.workflows.diagnose.images import FEATURES, ImageProbe, image_probe
from msrl.workflows.diagnose.target import Target
from msrl.workflows.diagnose.worker import DiagnoseWorker, RankRecording
from msrl.workflows.engine import engine_settings, started_engine
from msrl.workflows.rl.weight_offer import WeightOffer, received_tensors
from msrl.workflows.training.settings import worker_variables
from msrl.workflows.training.train_worker import SavePlan
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.local import local_workers

if TYPE_CHECKING:
    from msrl.checkpoint.source import WeightSource
    from msrl.rollout.vllm import VllmEngine

_PROBE_TOKENS = 260  # of a cached prefix: more than two blocks of every engine
_PROBE_RESPONSE = 4
_NUM_PROBES = 4


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sequences of prompt and response with the engine's log-probabilities of the response."""

    token_ids: tuple[Ints, ...]  # [T] each
    num_prompt_tokens: tuple[int, ...]
    logprobs: tuple[Floats, ...]  # [R] each

    def responses(self, rows: Sequence[Floats], *, first: int) -> Floats:
        """Return the values of all response tokens, [N]. The first value is of token `first`."""
        pairs = zip(rows, self.num_prompt_tokens, strict=True)
        return np.concatenate([row[count - first :] for row, count in pairs])

    def sequences(self) -> Sequences:
        """Return the sequences with all response tokens selected."""
        counts = zip(self.token_ids, self.num_prompt_tokens, strict=True)
        masks = tuple(np.arange(len(ids)) >= count for ids, count in counts)
        return Sequences(self.token_ids, masks, {})

    @property
    def longest(self) -> int:
        """Number of the longest sequence."""
        return int(np.argmax([len(ids) for ids in self.token_ids]))


def collect(target: Target, platform: Platform) -> Evidence:
    """Start ranks and an engine, and return the evidence about their agreement."""
    probe = image_probe(target.plan.shape, target.reference_dir)
    with contextlib.ExitStack() as stack:
        with progress("starting the training ranks", total=1, unit="model replica") as bar:
            trainers = stack.enter_context(open_ranks(target, platform))
            bar.advance()
        with progress("starting the engine", total=1, unit="engine") as bar:
            engine = stack.enter_context(open_engine(target, platform, probe))
            bar.advance()
        return compare(target, trainers, engine, probe)


@contextlib.contextmanager
def open_ranks(
    target: Target, platform: Platform, worker: type[DiagnoseWorker] = DiagnoseWorker
) -> Iterator[TrainerGroup]:
    """Start the training ranks of one model replica with the weights of the target."""
    config, root = target.plan.config, target.plan.checkpoint_dir
    with local_workers(
        partial(worker, target.settings),
        num_workers=world_size(config),
        platform=platform,
        env=worker_variables(config, platform),
    ) as workers:
        trainers = TrainerGroup(workers)
        saves = SavePlan(root, target.plan.model.hf_dir, in_background=False)
        trainers.start(target.resume, saves)
        yield trainers
        trainers.close()


@contextlib.contextmanager
def open_engine(
    target: Target, platform: Platform, probe: ImageProbe | None = None
) -> Iterator[VllmEngine]:
    """Start an engine as a run does: with random weights, which the ranks replace.

    It reads images if there is one to compare.
    """
    plan = target.plan
    images = probe.engine_images if probe is not None and _fits(target, probe) else None
    settings = engine_settings(
        plan.config,
        plan.model.hf_dir,
        dtype=plan.dtype,
        logits_dtype=plan.config.model.logits_dtype,
        max_model_len=target.max_model_len,
        random_weights=True,
    )
    settings = replace(settings, tokenizer_dir=plan.tokenizer_dir, images=images)
    with started_engine(settings, platform) as engine:
        yield engine


def compare(
    target: Target,
    trainers: TrainerGroup,
    engine: VllmEngine,
    probe: ImageProbe | None = None,
) -> Evidence:
    """Return the evidence about running ranks and a running engine."""
    probes = _probes(target)
    has_cache = target.plan.rollout.engine.prefix_cache
    with progress("loading the weights into the engine", total=1, unit="engine") as bar:
        if has_cache:
            engine.generate(probes, _plain(1), 0)  # fills the cache with keys of random weights
        sent, received = transfer(target, trainers, engine)
        bar.advance()
    with progress("sampling", total=len(target.prompts), unit="sequences") as bar:
        cache = _cache_probe(engine, probes) if has_cache else None
        samples = _sample(target, engine, bar.advance)
    expected = reference.score(
        target.source,
        target.plan.dtype,
        [*samples.token_ids],
        samples.longest,
        target.sampling,
        probe,
    )
    logprobs = _logprobs(target, trainers, engine, samples, expected)
    with progress("recording the layers of engine and ranks", total=2, unit="passes") as bar:
        engine_component = _engine_component(target, engine, samples, _worst(sent, received))
        features, with_image = _with_image(target, trainers, engine, probe)
        engine_component = replace(engine_component, image=features)
        bar.advance()
        trainer_component = _trainer_component(target, trainers, samples, sent, probe)
        bar.advance()
    with progress("comparing with files and record", total=2, unit="comparisons") as bar:
        reference_component = _reference_component(target, expected)
        bar.advance()
        recorded = _score_record(target, trainers)
        bar.advance()
    return Evidence(
        sampling=target.sampling,
        engine=engine_component,
        trainer=trainer_component,
        reference=reference_component,
        logprobs=logprobs,
        cache=cache,
        adapted=target.adapted,
        base_digests={} if target.base is None else _digests(target.base, target.plan.dtype),
        recorded=recorded,
        with_image=with_image,
    )


def transfer(
    target: Target, trainers: TrainerGroup, engine: VllmEngine
) -> tuple[Digests, Sequence[Digests]]:
    """Send the ranks' weights to the engine; return the digests on both sides."""
    config = target.plan.config
    timeout_s, size = config.cluster.rpc_timeout_s, config.rollout.weights.bucket_bytes
    addresses = trainers.workers.call("connect_weights", size, timeout_s)
    senders = {rank: sender for rank, sender in enumerate(addresses) if sender is not None}
    stages: dict[int, list[Any]] = {}
    for sender in senders.values():
        stages.setdefault(sender.stage, []).append(sender.channel)
    channels = tuple(tuple(stages[stage]) for stage in sorted(stages))
    offer = WeightOffer(0, channels, True, timeout_s)
    sending = trainers.workers.begin_each("send_weights", dict.fromkeys(senders, (0, 1, True)))
    received = engine.load_weights(received_tensors(offer, target.plan.shape), verify=True)
    return add_digests(trainers.workers.wait(sending)), received


def _worst(sent: Digests, received: Sequence[Digests]) -> Digests:
    """Return the digests of the engine's process that differs most from the ranks."""
    return max(received, key=lambda digests: len(differences(sent, digests)))


# Sampling and scoring


def _plain(max_tokens: int) -> SamplingParams:
    """Return the parameters of sampling from the model's own distribution."""
    return SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)


def _probes(target: Target) -> list[Prompt]:
    """Return prompts that fill blocks of the prefix cache."""
    length = min(_PROBE_TOKENS, target.max_model_len - _PROBE_RESPONSE - 1)
    return [
        Prompt(number, np.resize(prompt.token_ids, length))
        for number, prompt in enumerate(target.prompts[:_NUM_PROBES])
    ]


def _cache_probe(engine: VllmEngine, probes: Sequence[Prompt]) -> CacheProbe:
    """Sample with the cache as it is, and score the same tokens without it."""
    groups = engine.generate(probes, _plain(_PROBE_RESPONSE), 0)
    samples = _as_samples(groups)
    engine.forget_prompts()
    recomputed = samples.responses(engine.score(samples.token_ids), first=1)
    return CacheProbe(np.concatenate(samples.logprobs), recomputed)


def _sample(
    target: Target, engine: VllmEngine, on_finished: Callable[[int], object]
) -> SampledTokens:
    """Sample a response to each prompt that leaves room for one."""
    limit = target.max_model_len - 1
    short = [prompt for prompt in target.prompts if len(prompt.token_ids) < limit]
    if not short:
        raise MsrlError(
            f"max_model_len={target.max_model_len}: no prompt is short enough for a response. Set "
            "rollout.engine.max_model_len to a larger value."
        )
    longest = max(len(prompt.token_ids) for prompt in short)
    sampling = replace(target.sampling, max_tokens=min(target.sampling.max_tokens, limit - longest))
    groups = engine.generate(short, sampling, target.version, on_finished=on_finished)
    return _as_samples(groups)


def _as_samples(groups: Sequence[Any]) -> SampledTokens:
    pairs = [(group.prompt.token_ids, group.completions[0]) for group in groups]
    return SampledTokens(
        tuple(np.concatenate((ids, completion.token_ids)) for ids, completion in pairs),
        tuple(len(ids) for ids, _ in pairs),
        tuple(completion.logprobs for _, completion in pairs),
    )


def _logprobs(
    target: Target,
    trainers: TrainerGroup,
    engine: VllmEngine,
    samples: SampledTokens,
    expected: reference.ReferenceScores,
) -> Logprobs:
    count = len(samples.token_ids)
    with progress("scoring with the engine", total=2 * count, unit="sequences") as bar:
        together = samples.responses(engine.score(samples.token_ids), first=1)
        bar.advance(count)
        alone = samples.responses(_one_by_one(engine, samples, bar.advance), first=1)
    with progress("scoring with the training ranks", total=4 * count, unit="sequences") as bar:

        def score(per_batch: int, request: TokenRequest) -> Floats:
            values = trainers.forward(request, samples.sequences(), BatchLimits(per_batch))
            bar.advance(count)
            return samples.responses(values["logprobs"], first=0)

        is_rounded = target.plan.dtype == "bfloat16"
        return Logprobs(
            sampled=np.concatenate(samples.logprobs),
            trainer=score(count, TokenRequest(temperature=target.sampling.temperature)),
            engine_together=together,
            engine_alone=alone,
            trainer_packed=score(count, TokenRequest()),
            trainer_alone=score(1, TokenRequest()),
            reference=samples.responses(expected.raw, first=1),
            reference_tempered=samples.responses(expected.tempered, first=1),
            reference_filtered=samples.responses(expected.filtered, first=1),
            trainer_in_float32=score(1, TokenRequest(in_float32=True)) if is_rounded else None,
        )


def _one_by_one(
    engine: VllmEngine, samples: SampledTokens, advance: Callable[[], None]
) -> list[Floats]:
    rows: list[Floats] = []
    for ids in samples.token_ids:
        engine.forget_prompts()
        rows += engine.score([ids])
        advance()
    return rows


def _score_record(target: Target, trainers: TrainerGroup) -> Recorded | None:
    """Score the samples of the rollout record with the version that they name."""
    records = target.recorded
    if not records:
        return None
    sequences = Sequences(
        tuple(record.token_ids for record in records),
        tuple(record.is_sampled for record in records),
        {},
    )
    request = TokenRequest(temperature=target.sampling.temperature)
    rows = trainers.forward(request, sequences, BatchLimits(1))["logprobs"]
    masks = [record.is_sampled for record in records]
    behavior = [record.values["behavior"] for record in records]
    return Recorded(
        records[0].step,
        target.version,
        _join_selected(behavior, masks),
        _join_selected(rows, masks),
    )


def _join_selected(rows: Sequence[Floats], masks: Sequence[Any]) -> Floats:
    return np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)])


# Components


def _engine_component(
    target: Target, engine: VllmEngine, samples: SampledTokens, digests: Digests
) -> Component:
    shape, ids = target.plan.shape, samples.token_ids[samples.longest]
    facts = engine.call_workers("describe_model")[0]
    num_experts = 0 if shape.moe is None else shape.moe.num_experts
    engine.forget_prompts()
    engine.call_workers("begin_recording", shape.num_layers, num_experts)
    engine.score([ids])
    layers, logits, biases = engine.call_workers("end_recording")[0]
    return Component(
        dtype=facts["dtype"],
        cache_dtype=facts["cache_dtype"],
        digests=_as_text(digests),
        settings=reference.config_settings(facts["config"], shape),
        encodings=rendered_encodings(target.renderer, lambda text: engine.encode(text).tolist()),
        activations=by_layer(layers, len(ids)),
        experts=_chosen_experts(target, by_layer(logits, len(ids)), biases),
    )


def _chosen_experts(
    target: Target, logits: Mapping[str, Floats], biases: Mapping[str, Floats]
) -> dict[int, Ints]:
    """Return the experts that router logits [T, E] select, sorted, [T, k] by layer."""
    moe = target.plan.shape.moe
    if moe is None:
        return {}
    import torch

    from msrl.trainer.model.experts import choose_experts

    chosen: dict[int, Ints] = {}
    for name, values in logits.items():
        bias = torch.from_numpy(biases[name]) if name in biases else None
        _, experts = choose_experts(torch.from_numpy(values), moe, bias)
        chosen[int(name.split()[-1])] = np.sort(experts.numpy(), axis=1)
    return chosen


def _trainer_component(
    target: Target,
    trainers: TrainerGroup,
    samples: SampledTokens,
    digests: Digests,
    probe: ImageProbe | None,
) -> Component:
    dtype, shape = trainers.workers.call("describe_model")[0]
    sequences = samples.sequences()
    alone = Sequences(
        (sequences.token_ids[samples.longest],), (sequences.loss_masks[samples.longest],), {}
    )
    trainers.workers.call("begin_recording")
    trainers.forward(TokenRequest(), alone, BatchLimits(1))
    ranks: list[RankRecording] = trainers.workers.call("end_recording")
    num_tokens = len(alone.token_ids[0])
    routed = by_layer(_join_recordings([(rank, rank.experts) for rank in ranks]), num_tokens)
    layers = by_layer(_join_recordings([(rank, rank.layers) for rank in ranks]), num_tokens)
    return Component(
        dtype=dtype,
        digests=_as_text(digests),
        settings=reference.shape_settings(shape),
        encodings=rendered_encodings(
            target.renderer,
            lambda text: (
                target.renderer.tokenizer.backend.encode(text, add_special_tokens=False).ids
            ),
        ),
        activations=layers,
        experts={int(name.split()[-1]): _columns(rows) for name, rows in routed.items()},
        image={} if probe is None else trainer_image(trainers, probe),
    )


def _with_image(
    target: Target, trainers: TrainerGroup, engine: VllmEngine, probe: ImageProbe | None
) -> tuple[dict[str, Floats], tuple[Floats, Floats] | None]:
    """Return the engine's features of an image, and log-probabilities of engine and ranks."""
    if probe is None or not _fits(target, probe):
        return {}, None
    ids, images = probe.token_ids, (probe.image,)
    engine.forget_prompts()
    engine.call_workers("begin_features")
    (scores,) = engine.score([ids], [images])
    features: Floats | None = engine.call_workers("end_features")[0]
    sequences = Sequences((ids,), (np.arange(len(ids)) > 0,), {}, images=(images,))
    (row,) = trainers.forward(TokenRequest(), sequences, BatchLimits(1))["logprobs"]
    if features is None:
        return {}, (scores, row[1:])
    # Features of Qwen3-VL for deeper layers follow those of the embedding.
    return {FEATURES: features[:, : target.plan.shape.hidden_size]}, (scores, row[1:])


def _fits(target: Target, probe: ImageProbe) -> bool:
    return len(probe.token_ids) < target.max_model_len


def trainer_image(trainers: TrainerGroup, probe: ImageProbe) -> dict[str, Floats]:
    """Return the stages of an image on the first rank that has the vision tower."""
    ranks: list[dict[str, Floats]] = trainers.workers.call("record_image", probe)
    return next((stages for stages in ranks if stages), {})


def _join_recordings(
    recordings: Sequence[tuple[RankRecording, Mapping[str, Floats]]],
) -> dict[str, Floats]:
    """Return the values of the first model replica; tokens that ranks split are joined again."""
    shards: dict[str, dict[int, Floats]] = {}
    for rank, values in recordings:
        for name, rows in values.items():
            index = rank.tp_rank if rank.is_split else 0
            shards.setdefault(name, {}).setdefault(index, rows)
    return {
        name: np.concatenate([rows[index] for index in sorted(rows)])
        for name, rows in shards.items()
    }


def _columns(rows: Floats) -> Ints:
    """Return the columns that are not 0, [T, k], of rows [T, E] with k of them each."""
    return np.nonzero(rows)[1].reshape(len(rows), -1)


# Digests


def _reference_component(target: Target, scores: reference.ReferenceScores) -> Component:
    folder, with_template = target.reference_dir, target.has_folder_template
    return Component(
        dtype=target.plan.dtype,
        digests=_file_digests(target),
        settings=scores.settings,
        encodings=folder_encodings(folder, with_template=with_template),
        activations=scores.activations,
        image=scores.image,
    )


def _file_digests(target: Target) -> dict[str, str]:
    """Return the digests of the weights on disk.

    Merged adapters have none: ranks merge them in another precision.
    """
    if target.base is not None:
        return {}
    return _digests(target.source, target.plan.dtype)


def _digests(source: WeightSource, dtype: str) -> dict[str, str]:
    from msrl.checkpoint.dtypes import BY_HF_NAME, cast_to
    from msrl.models.families import all_rules

    digests: dict[str, str] = {}
    for rule in all_rules(source.shape):
        target_dtype = cast_to(rule, BY_HF_NAME[dtype])
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
            cast = tensor if target_dtype is None else tensor.to(target_dtype)
            digests |= _as_text(dict(file_digests(name, cast, 0)))
    return digests


def _as_text(digests: Digests) -> dict[str, str]:
    return {
        name: f"{digest.dtype} {list(digest.shape)} {digest.value:016x}"
        for name, digest in digests.items()
    }
