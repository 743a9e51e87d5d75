"""Log-probabilities, layers and settings of transformers in float32.

T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.diagnose.recorder import Recorder, by_layer, decoder_layers, layer_name, layer_output
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape
from msrl.tracking.progress import progress
from msrl.types import Floats, Ints, SamplingParams
from msrl.workflows.diagnose.images import ImageProbe, reference_stages

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.checkpoint.source import WeightSource

# Fields of Shape that do not change what a layer computes, or that only one component reads.
_NOT_COMPARED = frozenset(
    {
        "architecture",
        "dtype",
        "family",
        "max_position_embeddings",
        "may_lack_pass_through",
        "feed_forward.aux_loss_coef",  # of training; config classes have a default for it
        "pass_through",
        "tie_word_embeddings",
        "vision",
    }
)


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """Log-probabilities of every token but the first of each sequence, [T - 1] each.

    `image` has the stages of an image before the decoder layers.
    """

    raw: tuple[Floats, ...]
    tempered: tuple[Floats, ...]
    filtered: tuple[Floats, ...]
    activations: Mapping[str, Floats]
    settings: Mapping[str, Any]
    image: Mapping[str, Floats] = field(default_factory=dict[str, Floats])


def score(
    source: WeightSource,
    dtype: str,
    sequences: Sequence[Ints],
    recorded: int,
    sampling: SamplingParams,
    probe: ImageProbe | None = None,
) -> ReferenceScores:
    """Score sequences with transformers, whose weights are rounded to `dtype`.

    The layers of sequence `recorded` and the stages of the image of `probe` are recorded, if the
    model fits into memory.
    """
    import torch

    from msrl.checkpoint.dtypes import BY_HF_NAME
    from msrl.verification import layerwise
    from msrl.verification.logits import transformers_model
    from msrl.verification.report import fits_in_memory

    rounding, tokens = BY_HF_NAME[dtype], [ids.tolist() for ids in sequences]
    if layerwise.model_class(source.shape) is None:
        raise MsrlError(
            f"{source.hf_dir}: transformers has no {source.shape.architecture}, with which engine "
            "and trainer are compared."
        )
    if not fits_in_memory(source.shape):
        print_note("The model does not fit into memory: scoring layer by layer")
        logits = layerwise.transformers_logits(source, tokens, rounding)
        return _scores(logits, sequences, sampling, {}, {})
    recorder = Recorder()
    logits: list[Tensor] = []
    total = len(tokens) + 1
    with (
        torch.inference_mode(),
        progress("scoring with transformers", total=total, unit="sequences") as bar,
    ):
        model = transformers_model(source, rounding)
        for ids in tokens:
            logits.append(layerwise.outputs(model, torch.tensor([ids]), source.shape)[0])
            bar.advance()
        for number, layer in decoder_layers(model, source.shape.num_layers):
            recorder.watch(layer_name(number), layer, layer_output)
        layerwise.outputs(model, torch.tensor([tokens[recorded]]), source.shape)
        image = {} if probe is None else reference_stages(model, probe, source.hf_dir)
        bar.advance()
    activations = by_layer(recorder.end(), len(tokens[recorded]))
    settings = config_settings(model.config.to_dict(), source.shape)
    return replace(_scores(logits, sequences, sampling, activations, settings), image=image)


def _scores(
    logits: Sequence[Tensor],  # [T, V] each
    sequences: Sequence[Ints],
    sampling: SamplingParams,
    activations: Mapping[str, Floats],
    settings: Mapping[str, Any],
) -> ReferenceScores:
    rows = list(zip(logits, sequences, strict=True))
    temperature = sampling.temperature
    return ReferenceScores(
        raw=tuple(_pick(row, ids) for row, ids in rows),
        tempered=tuple(_pick(row / temperature, ids) for row, ids in rows),
        filtered=tuple(_pick(filter_logits(row / temperature, sampling), ids) for row, ids in rows),
        activations=activations,
        settings=settings,
    )


def _pick(
    logits: Tensor,  # [T, V]
    token_ids: Ints,  # [T]
) -> Floats:  # [T - 1]
    """Return the log-probability of each token but the first."""
    import torch

    logprobs = logits[:-1].float().log_softmax(-1)
    labels = torch.from_numpy(np.ascontiguousarray(token_ids[1:]))[:, None]
    return logprobs.gather(-1, labels).squeeze(-1).numpy()


def filter_logits(
    logits: Tensor,  # [T, V], divided by the temperature
    sampling: SamplingParams,
) -> Tensor:  # [T, V]
    """Return logits that are -inf for tokens that min-p, top-k or top-p exclude."""
    logits = logits.float().clone()
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        limit = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits[probabilities < limit] = -np.inf
    if sampling.top_k > 0:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits[logits < least] = -np.inf
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        # The most likely token stays, whatever its probability.
        excluded = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        excluded[:, -1] = False
        logits[excluded.scatter(-1, order, excluded)] = -np.inf
    return logits


def config_settings(values: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the settings in a config of vLLM or transformers, as msrl reads them.

    Nothing is compared if they cannot be read, as with a family whose config class renames keys.
    """
    config = HfConfig({"architectures": [shape.architecture], **_present(values)}, "config")
    try:
        return shape_settings(shape_from_config(config))
    except MsrlError:
        return {}


def shape_settings(shape: Shape) -> dict[str, Any]:
    """Return the values of a shape that change what its layers compute, by dotted name.

    A setting of layers, such as mixer.num_heads, has one value if all layers have the same one,
    otherwise a tuple with the value of each layer.
    """
    settings = asdict(shape)
    layers = [
        {
            f"{part}.{name}": value
            for part, values in layer.items()
            for name, value in _with_rotary(values).items()
        }
        for layer in settings.pop("layers")
    ]
    for name in dict.fromkeys(name for layer in layers for name in layer):
        values = [layer.get(name) for layer in layers]
        is_same = all(value == values[0] for value in values)
        settings[name] = values[0] if is_same else tuple(values)
    return {name: value for name, value in settings.items() if name not in _NOT_COMPARED}


def _with_rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a part of a layer, with those of its rotary embedding by their names."""
    rotary = values.get("rotary", {})
    others = {name: value for name, value in values.items() if name != "rotary"}
    return others | {f"rotary.{name}": value for name, value in rotary.items()}


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are set; classes of configurations write null for the others."""
    return {name: value for name, value in values.items() if value is not None}
