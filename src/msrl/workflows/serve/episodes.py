"""Episodes of `msrl generate`: their prompts, and the summary of their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl.config.schema import Config
from msrl.config.sections.environment import EnvironmentConfig
from msrl.data.chat_template import chat_template
from msrl.data.render import Renderer
from msrl.environments.base import Opening
from msrl.environments.pool import select_environment
from msrl.errors import MsrlError
from msrl.rollout.episodes.runner import environment_row
from msrl.rollout.episodes.settings import EpisodeSettings, environment_sources
from msrl.types import Ints, Prompt, RolloutGroup
from msrl.workflows.episodes.metrics import episode_metrics
from msrl.workflows.episodes.setup import (
    check_environment_names,
    check_openings,
    make_settings,
)

_PROMPT_COLUMNS = ("prompt", "messages", "tools", "answer")


def row_prompt(index: int, row: Mapping[str, Any], token_ids: Ints) -> Prompt:
    """Return a prompt with the columns of its row, as text, for the environment."""
    columns = {name: _text(value) for name, value in row.items() if name not in _PROMPT_COLUMNS}
    return Prompt(index, token_ids, _text(row.get("answer", "")), columns)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def episode_settings(
    config: Config, hf_dir: Path, renderer: Renderer, prompts: Sequence[Prompt]
) -> EpisodeSettings | None:
    """Return the settings of episodes; None if a response is one turn.

    Raises:
        MsrlError: An environment cannot be opened with its first row, or does not begin the
            conversation of a row without a prompt.
    """
    section, limit = config.environment, config.rollout.max_prompt_tokens
    if not section.is_on:
        return None
    check_environment_names(section, prompts)
    longest = max(limit, *(len(prompt.token_ids) for prompt in prompts))
    settings = make_settings(section, hf_dir, chat_template(renderer), longest)
    seed = config.run.seed if config.generate.seed is None else config.generate.seed
    openings = check_openings(settings, prompts, seed)
    _check_empty(section, prompts, seed, openings)
    return settings


def _check_empty(
    section: EnvironmentConfig,
    prompts: Sequence[Prompt],
    seed: int | None,
    openings: Mapping[str, Opening],
) -> None:
    """Raise MsrlError if an environment does not begin the conversation of a row without prompt."""
    sources = environment_sources(section)
    for prompt in prompts:
        if len(prompt.token_ids):
            continue
        row = environment_row(prompt, seed, keeps_name=bool(section.mixture))
        name = select_environment(sources, row)
        if not openings[name].messages:
            raise MsrlError(
                f"environment: {section.name or section.path or name} returns no first messages, "
                f"and row {prompt.index} of the input has no prompt. Add the column prompt or "
                "messages."
            )


def episode_summary(groups: Sequence[RolloutGroup]) -> str:
    """Return success rate, turns and tool errors in one line; empty without episodes."""
    metrics = episode_metrics(groups)
    if not metrics:
        return ""
    texts = [
        f"success {metrics['success']:.1%}" if "success" in metrics else "",
        f"{metrics['turns']:.1f} turns",
        f"{metrics['tool_errors']:.1%} of tool calls failed" if "tool_errors" in metrics else "",
        f"{metrics['faults']:.1%} of episodes ended by a fault" if metrics["faults"] else "",
    ]
    return ", ".join(text for text in texts if text)
