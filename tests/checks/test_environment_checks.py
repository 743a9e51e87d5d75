"""Checks of the section `environment`, and refusals of combinations that it does not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.checks.effects import check_effects
from msrl.checks.environment import check_environment
from msrl.checks.validate import find_errors
from msrl.config.loader import load
from msrl.config.sections.environment import EnvironmentConfig, MixtureEntry
from msrl.data.chat_template import chat_template
from msrl.data.render import Renderer, make_renderer
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.types import Conversation, Message, Prompt
from msrl.workflows.episodes.setup import (
    check_environment_names,
    check_openings,
    first_rows,
    make_settings,
)
from support import assert_each_mentions, mentions
from tiny_qwen2 import make_tokenizer


def errors(*sets: str) -> list[str]:
    resolved = load(sets=sets)
    return [*check_environment(resolved), *check_effects(resolved, "train-grpo")]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (("environment.max_turns=3",), [("environment.max_turns=3", "environment.name")]),
        (
            (
                "environment.name=frozen_lake",
                "environment.lockstep=true",
                "rollout.async.max_staleness=1",
            ),
            [("environment.lockstep=true", "rollout.async")],
        ),
        (
            ("environment.name=frozen_lake", "environment.max_tokens=100000000"),
            [("environment.max_tokens=100000000", "rollout.max_prompt_tokens")],
        ),
        (
            ("algo.mask.invalid_actions=true",),
            [("algo.mask.invalid_actions=true", "environment.name")],
        ),
        (("environment.name=frozen_lak",), [("environment.name=frozen_lak", "frozen_lake")]),
        (
            ("environment.name=frozen_lake", "environment.options={sizes: 4}"),
            [("environment.options.sizes", "size")],
        ),
        (
            ("environment.name=frozen_lake", "environment.options={size: big}"),
            [("environment.options.size", "integer")],
        ),
        (
            ("environment.name=frozen_lake", "environment.path=walk.py:Walk"),
            [("environment", "path")],
        ),
        (("environment.path=walk.py:Walk",), [("environment.path", "does not exist")]),
        (("environment.path=walk.py",), [("environment.path=walk.py", "NAME")]),
        (
            ("environment.name=frozen_lake", "environment.tool_format=herms"),
            [("environment.tool_format=herms", "hermes")],
        ),
        (
            ("environment.name=frozen_lake", "reward.format_penalty=0.5"),
            [("reward.format_penalty=0.5", "episode")],
        ),
        (
            (
                "environment.name=frozen_lake",
                "reward.sources=[{verifier: acc, name: environment}]",
            ),
            [("reward.sources.0", "name")],
        ),
        (
            (
                "environment.name=frozen_lake",
                "algo.advantage.estimator=gigpo",
                "reward.norm.center=group",
                "reward.clip=1.0",
                "algo.advantage.whiten_rewards=true",
            ),
            [
                ("reward.norm.center=group", "gigpo"),
                ("reward.clip=1.0", "gigpo"),
                ("algo.advantage.whiten_rewards=true", "gigpo"),
            ],
        ),
        (
            (
                "environment.name=frozen_lake",
                "environment.reward_at=end",
                "algo.advantage.estimator=step_reinforce",
                "algo.advantage.whiten_rewards=true",
            ),
            [("algo.advantage.whiten_rewards=true", "step_reinforce")],
        ),
        (
            (
                "environment.name=frozen_lake",
                "environment.reward_at=turn",
                "algo.advantage.estimator=reinforce",
                "reward.clip=1.0",
            ),
            [("environment.reward_at=turn", "reward.clip", "end")],
        ),
        (
            (
                "environment.mixture={lake: {name: frozen_lake}, walk: {weight: 0}}",
                "environment.timeout_s=3",
            ),
            [
                ("environment.timeout_s", "environment.mixture"),
                ("environment.mixture.walk", "name"),
            ],
        ),
        (
            ("environment.mixture={lake: {name: frozen_lake, weight: 0}}",),
            [("environment.mixture", "weights")],
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(
    sets: tuple[str, ...], expected: list[tuple[str, ...]]
) -> None:
    assert_each_mentions(errors(*sets), *expected)


def test_valid_settings_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("walk.py").write_text("class Walk: ...\n")
    assert not errors()
    assert not errors("environment.path=walk.py:Walk", "environment.max_turns=3")
    assert not errors("environment.name=single_turn", "reward.format_penalty=0.5")
    norm = ("environment.name=frozen_lake", "reward.norm.center=group")
    assert not errors(*norm, "environment.reward_at=end")
    assert not errors(*norm, "algo.advantage.estimator=reinforce")
    by_turn = "algo.advantage.estimator=agentic_reinforce"
    assert not errors(*norm, "environment.reward_at=end", by_turn)
    assert not errors("environment.name=frozen_lake", "algo.advantage.estimator=gigpo")
    assert not errors(
        "environment.mixture={lake: {name: frozen_lake, options: {size: 3}}, "
        "walk: {path: walk.py:Walk, weight: 2.0}}"
    )


def grpo_errors(*sets: str) -> list[str]:
    resolved = load(sets=sets)
    return find_errors(resolved, resolve(resolved.config, "train-grpo"))


def test_rewards_may_come_from_the_environment_alone() -> None:
    def names_sources(*sets: str) -> bool:
        return any("reward.sources" in line for line in grpo_errors(*sets))

    assert names_sources()
    assert names_sources("environment.name=single_turn")
    assert not names_sources("environment.name=frozen_lake")


def test_a_loss_with_one_advantage_per_sequence_refuses_advantages_of_turns() -> None:
    sets = ("environment.name=frozen_lake", "algo.policy_loss=gmpo")
    lines: Any = [
        line
        for line in grpo_errors(*sets, "algo.advantage.estimator=gigpo")
        if "algo.advantage.estimator" in line
    ]
    assert_each_mentions(lines, ("gigpo", "gmpo", "turn"))


def test_a_row_that_selects_an_unknown_environment_is_refused() -> None:
    entries = {"lake": MixtureEntry(name="frozen_lake")}
    section = EnvironmentConfig(mixture=entries)
    ids = np.array([1])
    known = [Prompt(0, ids, "", {"environment": "lake"}), Prompt(1, ids)]
    check_environment_names(section, known)
    check_environment_names(EnvironmentConfig(name="frozen_lake"), [unknown := _row("lakes")])
    with pytest.raises(MsrlError, match=mentions("environment.mixture", "'lakes'", "lake")):
        check_environment_names(section, [*known, unknown])


def _row(environment: str) -> Prompt:
    return Prompt(2, np.array([1]), "", {"environment": environment})


@pytest.mark.slow
def test_each_environment_of_a_mixture_is_opened_with_a_row_that_may_run_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    asks = {"prompt_column": "question"}
    section = EnvironmentConfig(
        mixture={
            "lake": MixtureEntry(name="frozen_lake"),
            "math": MixtureEntry(name="calculator", options=asks),
        }
    )
    settings = make_settings(section, tmp_path, chat_template(_renderer(tmp_path)), 2000)
    lake, math = [
        Prompt(number, np.array([1]), "5", {"environment": name, "question": "2 + 3?"})
        for number, name in enumerate(("lake", "math"))
    ]
    unasked = Prompt(2, np.array([1]), "5")
    assert list(check_openings(settings, [lake], 0)) == ["lake"]
    assert first_rows(section, [lake, math, unasked]) == {"lake": lake, "math": math}
    drawn = first_rows(section, [lake, unasked])
    assert [drawn[name].index for name in ("lake", "math")] == [0, 2]
    short = replace(settings, max_prompt_tokens=20)
    with pytest.raises(MsrlError, match=mentions("rollout.max_prompt_tokens=20", "row 0")):
        check_openings(short, [lake], 0)
    with pytest.raises(MsrlError, match=mentions("environment.mixture.math", "row 2", "question")):
        check_openings(settings, [lake, unasked], 0)


def _renderer(folder: Path) -> Renderer:
    return make_renderer(load_template("qwen_retool"), text_tokenizer(load_tokenizer(folder)))


@pytest.mark.slow
def test_prompts_that_show_the_tools_need_no_template_that_lists_them(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    renderer = _renderer(tmp_path)
    section = EnvironmentConfig(name="python_tool")
    settings = make_settings(section, tmp_path, chat_template(renderer), 2000)
    ids = renderer.prompt(Conversation((Message("user", "What is 2 + 3?"),)))
    opening = check_openings(settings, [Prompt(0, ids)], 0)["environment"]
    assert opening.tools and not opening.messages
    with pytest.raises(MsrlError, match=mentions("row 3", "code_interpreter", "prompt_column")):
        check_openings(settings, [Prompt(3, ids[-20:])], 0)
    edited = section.model_copy(update={"history": "template"})
    settings = make_settings(edited, tmp_path, chat_template(renderer), 2000)
    keywords = ("environment.history=template", "python_tool", "row 4", "prompt_column", "append")
    with pytest.raises(MsrlError, match=mentions(*keywords)):
        check_openings(settings, [Prompt(4, ids)], 0)
    asks = section.model_copy(update={"options": {"prompt_column": "question"}})
    settings = make_settings(asks, tmp_path, chat_template(renderer), 2000)
    with pytest.raises(MsrlError, match=mentions("environment", "tools")):
        check_openings(settings, [Prompt(0, ids, "", {"question": "2 + 3?"})], 0)
