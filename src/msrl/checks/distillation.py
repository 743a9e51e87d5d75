"""Checks of `algo.distill`, and of the other keys of train-distill."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks import plugins
from msrl.checks.inputs import check_model_path
from msrl.checks.preference import changed_keys
from msrl.checks.roles import Longest, check_fit
from msrl.config.loader import Resolved
from msrl.config.sections.algo import TeacherConfig
from msrl.models.paths import is_hf, is_mcore
from msrl.plan.distillation import implied_values
from msrl.plan.run_plan import RunPlan
from msrl.registry import DIVERGENCES
from msrl.rollout.teacher_server import key_refusal, url_refusal

# Keys of `algo` that train-distill reads, besides those that it implies.
_KEYS = ("distill", "aggregate", "entropy_coef", "mask.truncated")


def check_distill(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `algo.distill` that is invalid or has no effect."""
    distill = resolved.config.algo.distill
    if not distill.is_on:
        return
    plugin = (DIVERGENCES, distill.divergence, "divergence")
    yield from plugins.check_options(resolved, "algo.distill.options", plugin)
    if not distill.coef:
        yield resolved.mistake(
            "algo.distill.coef", "disables the term, but there are teachers. Remove one of them."
        )
    yield from _duplicates(resolved)
    for number, teacher in enumerate(distill.teachers):
        yield from _server(resolved, number, teacher)
    if distill.has_servers:
        yield from _advantages(resolved)


def _duplicates(resolved: Resolved) -> Iterator[str]:
    teachers = resolved.config.algo.distill.teachers
    names = [(teacher.model, teacher.url, teacher.served_name) for teacher in teachers]
    for number, name in enumerate(names):
        if name in names[:number]:
            key = "url" if teachers[number].model is None else "model"
            yield resolved.mistake(
                f"algo.distill.teachers.{number}.{key}",
                "is a duplicate. Add up the weights, or name all tags in one entry.",
            )


def _server(resolved: Resolved, number: int, teacher: TeacherConfig) -> Iterator[str]:
    """Yield a line for each key of a teacher that contradicts where it runs."""
    section = f"algo.distill.teachers.{number}"
    if (teacher.model is None) == (teacher.url is None):
        yield (
            f"{section}: needs either model, a folder, or url, the address of a server. "
            "Set one of them."
        )
        return
    if teacher.url is None:
        return
    if reason := url_refusal(teacher.url):
        yield resolved.mistake(f"{section}.url", reason)
    if teacher.api_key is not None and (reason := key_refusal(teacher.api_key)):
        yield f"{section}.api_key: {reason}."  # the value may be a key


def _advantages(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting that contradicts advantages from teachers on servers."""
    config = resolved.config
    algo, temperature = config.algo, config.rollout.sampling.temperature
    if temperature != 1:
        yield resolved.mistake(
            "rollout.sampling.temperature",
            "a teacher with url reports log-probabilities at temperature 1. Set it to 1, or use "
            "teachers with model.",
        )
    if not algo.distill.on_ranks and algo.distill.divergence != "reverse_kl":
        yield resolved.mistake(
            "algo.distill.divergence",
            "needs distributions over the vocabulary, but a server gives only the log-probability "
            "of the sampled token, from which reverse_kl is estimated. Remove it, or use teachers "
            "with model.",
        )
    if not algo.rl_coef:
        yield resolved.mistake(
            "algo.rl_coef",
            "disables the advantages, which teachers with url give. Set it above 0.",
        )
    if algo.sft.coef:
        yield resolved.mistake(
            "algo.sft.coef",
            "selects samples by the advantages of rewards, to which teachers with url add theirs. "
            "Set it to 0.",
        )


def check_teachers(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each teacher on the ranks that does not fit the policy."""
    for number, section in enumerate(resolved.config.algo.distill.teachers):
        if section.model is None or section.is_self:
            continue
        key = f"algo.distill.teachers.{number}.model"
        yield from check_model_path(resolved, key)
        if is_hf(section.model) or is_mcore(section.model):
            yield from check_fit(
                resolved,
                key,
                plan,
                plan.teachers[section.model],
                longest=Longest.sample(plan),
                remedy="Use a teacher with the same number, or serve this one and set url.",
            )


def check_train_distill(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting that train-distill needs or does not read."""
    config = resolved.config
    if not config.algo.distill.is_on:
        yield (
            "algo.distill.teachers: missing. Set at least one, as in "
            "algo: {distill: {teachers: [{model: runs/grpo/hf}]}}"
        )
    elif all(teacher.is_self for teacher in config.algo.distill.teachers):
        yield resolved.mistake(
            "algo.distill.teachers.0.model",
            "the divergence of the policy from its own start and its gradient are 0. Add another "
            "teacher, or use train-grpo.",
        )
    yield from _other_keys(resolved)
    if config.environment.is_on and not config.environment.is_single_turn:
        yield resolved.mistake(
            "environment", "is not supported in train-distill. Remove the section."
        )
    if not config.reward.sources and (config.eval.every_steps or config.eval.at_start):
        yield (
            "reward.sources: missing. Evaluations score responses. Set at least one source, as in "
            "reward: {sources: [{verifier: acc}]}, or remove eval.every_steps and eval.at_start."
        )


def _other_keys(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each changed key that train-distill does not read."""
    has_servers, implied = resolved.config.algo.distill.has_servers, implied_values(resolved.config)
    keys = (*_KEYS, "advantage.clip") if has_servers else _KEYS
    reason = "has no effect in train-distill, whose loss has no reward. Remove it."
    if has_servers:
        reason = "is not supported in train-distill. Remove it, or use train-grpo."
    for key in changed_keys(resolved, "algo"):
        name = key.removeprefix("algo.")
        is_read = any(name == own or name.startswith(f"{own}.") for own in keys)
        if not is_read and implied.get(key, ...) != resolved.value(key):
            yield resolved.mistake(key, reason)
