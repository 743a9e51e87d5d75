"""Keys without effect: the tables beside the schema, and the messages that follow from them."""

from __future__ import annotations

import pytest

from msrl import registry
from msrl.checks.effects import check_effects
from msrl.config.effects import NEEDS, READ_BY, Needs
from msrl.config.facts import key_facts
from msrl.config.loader import load
from msrl.config.options import TRAININGS
from support import assert_each_mentions


def test_the_tables_name_keys_trainings_and_plugins_that_exist():
    needs = [need for several in NEEDS.values() for need in several]
    keys = {*NEEDS, *READ_BY}
    for need in needs:
        keys |= {*need.keys} if isinstance(need, Needs) else {need.key}
    assert not [key for key in keys if key_facts(key) is None]
    assert {name for entry in READ_BY.values() for name in entry.commands} == {*TRAININGS}
    packages = {need.package for need in needs if not isinstance(need, Needs)}
    assert packages == {registry.ADVANTAGES, registry.LOSSES, registry.PREFERENCES}


@pytest.mark.parametrize(
    ("command", "sets", "fragments"),
    [
        ("train-grpo", "train.lora.alpha=8.0", ("train.lora.alpha=8.0", "without train.lora.rank")),
        ("train-grpo", "algo.clip.low=0.1 algo.policy_loss=gpg", ("algo.clip.low", "dppo")),
        ("train-grpo", "rollout.filter.low=0.1", ("rollout.filter.low", "rollout.filter.kind")),
        (
            "train-grpo",
            "rollout.filter.kind=std rollout.filter.high=0.1",
            ("rollout.filter.high", "kind=std", "mean"),
        ),
        (
            "train-sft",
            "train.micro_batch=2 train.max_tokens_per_micro_batch=9",
            ("train.micro_batch=2", "train.max_tokens_per_micro_batch=9", "Remove"),
        ),
        ("train-sft", "train.updates.epochs=2", ("train.updates.epochs=2", "train-grpo")),
        ("train-grpo", "train.global_batch=2", ("global_batch", "rollout.prompts_per_step")),
        (
            "train-distill",
            "algo.distill.teachers=[{model: self, retries: 1}]",
            ("algo.distill.teachers.0.retries=1", "algo.distill.teachers.0.url"),
        ),
        ("chat", "chat.top_k=3 chat.temperature=0.0", ("chat.top_k=3", "chat.temperature=0.0")),
    ],
)
def test_a_key_without_effect_is_refused_with_what_it_needs(
    command: str, sets: str, fragments: tuple[str, ...]
):
    words = sets.split() if " {" not in sets and "[" not in sets else [sets]
    assert_each_mentions(check_effects(load(sets=words), command), fragments)


def test_a_command_ignores_sections_of_other_commands():
    resolved = load(sets=["rollout.filter.low=0.1", "chat.top_k=3", "chat.temperature=0.0"])
    assert not list(check_effects(resolved, "train-sft"))
    assert not list(check_effects(resolved, "preprocess"))


def test_an_api_key_is_not_printed():
    teacher = "algo.distill.teachers=[{model: self, api_key: secret-text}]"
    (line,) = check_effects(load(sets=[teacher]), "train-distill")
    assert "api_key" in line and "secret-text" not in line
