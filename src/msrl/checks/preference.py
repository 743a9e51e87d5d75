"""Checks of `algo.preference` and of the other keys of train-dpo."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks import plugins
from msrl.checks.inputs import check_blend, check_blend_fraction, check_kind, check_model_path
from msrl.checks.roles import Longest, check_fit
from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.models.paths import is_hf, is_mcore
from msrl.models.reward_head import has_classifier
from msrl.plan.derived import preference_plan
from msrl.plan.run_plan import RunPlan
from msrl.registry import PREFERENCES

_REMEDIES = {
    "pairs": "with a handler for pairs such as pairs or sharegpt_pairs",
    "labeled": "with handler labeled",
    "steps": "with handler steps",
}


def check_preference(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each setting of train-dpo that is invalid or has no effect."""
    loss = preference_plan(resolved.config)
    plugin = (PREFERENCES, loss.name, "preference_loss")
    yield from check_kind(resolved, plan, loss.data, _REMEDIES[loss.data])
    yield from plugins.check_options(resolved, "algo.preference.options", plugin)
    if loss.options.get("form") == "hinge" and loss.options.get("label_smoothing"):
        yield resolved.mistake(
            "algo.preference.options.label_smoothing", "has no effect with form=hinge. Remove it."
        )
    yield from _reference(resolved, plan)
    yield from _labeled(resolved)
    yield from check_preference_data(resolved)


def check_reward_model(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each setting of train-rm that is invalid or has no effect."""
    kind = "steps" if plan.trains_steps else "pairs"
    yield from check_kind(resolved, plan, kind, _REMEDIES[kind])
    yield from check_preference_data(resolved)
    yield from _score_export(resolved, plan)


def _score_export(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that a reward model to export has a class in transformers."""
    shape = plan.model.shape
    if not resolved.config.checkpoint.export_hf or shape is None:
        return
    if shape.reward_head and not has_classifier(shape.architecture):
        yield resolved.mistake(
            "checkpoint.export_hf",
            f"transformers has no sequence classifier for {shape.architecture}. Set it to false.",
        )


def _reference(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the settings of the reference model."""
    config, loss = resolved.config, preference_plan(resolved.config)
    role = config.cluster.roles.reference
    if loss.needs_reference:
        key = "cluster.roles.reference.load"
        yield from check_model_path(resolved, key)
        if role.load is not None and (is_hf(role.load) or is_mcore(role.load)):
            assert plan.reference is not None, "the loss needs one"
            longest = _longest_side(plan)
            yield from check_fit(resolved, key, plan, plan.reference, longest=longest)
    if role.model_copy(update={"load": None}) != type(role)():
        yield (
            "cluster.roles.reference: train-dpo has no separate devices for the reference. Only "
            "load can be set. Use algo.preference.reference=precomputed to save memory."
        )


def _longest_side(plan: RunPlan) -> Longest | None:
    """Return the longest sequence of the data; None if neither manifests nor limits name it."""
    manifests = [dataset.manifest for dataset in plan.datasets.values()]
    tokens = [manifest.max_tokens for manifest in manifests if manifest is not None]
    limits = [] if plan.data.seq_length is None else [plan.data.seq_length]
    if tokens and len(tokens) == len(manifests):
        limits.append(max(tokens))
    return Longest(min(limits), "the rows of the data have") if limits else None


def _labeled(resolved: Resolved) -> Iterator[str]:
    """Check the settings of a loss on labeled answers, which has a baseline over each batch."""
    config, loss = resolved.config, preference_plan(resolved.config)
    if loss.data != "labeled":
        return
    if loss.is_precomputed:
        yield resolved.mistake(
            "algo.preference.reference",
            f"is not possible with algo.preference.loss={loss.name}: its baseline pairs the "
            "prompts and answers of each batch. Set it to on-the-fly.",
        )
    if config.train.global_batch < 2:
        yield resolved.mistake(
            "train.global_batch",
            f"must be at least 2 with algo.preference.loss={loss.name}, whose baseline pairs each "
            "prompt with the answer of another row",
        )


def check_preference_data(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `data` that trainings on preference data do not support."""
    yield from check_blend(resolved)
    yield from check_blend_fraction(resolved)


def changed_keys(resolved: Resolved, section: str) -> Iterator[str]:
    """Yield the keys below a section that are set to another value than the default."""
    defaults = Resolved(Config(), {})
    for key, origin in resolved.origins.items():
        is_item = any(name.isdigit() for name in key.split("."))
        if key.startswith(f"{section}.") and origin.is_given and not is_item:
            try:
                default = defaults.value(key)
            except KeyError:  # an option of a plugin
                default = None
            if resolved.value(key) != default:
                yield key
