"""Episodes of `msrl generate`: their prompts, and the summary of their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl.config.schema import Config
from msrl.data.chat_template import chat_template
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.types import Ints, Prompt, RolloutGroup
from msrl.workflows.episodes.metrics import episode_metrics
from msrl.workflows.episodes.setup import (
    check_environment_names,
    check_opening,
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
        MsrlError: The environment cannot be opened with the first row, or does not begin the
            conversation of a row without a prompt.
    """
    section, limit = config.environment, config.rollout.max_prompt_tokens
    if not section.is_on:
        return None
    check_environment_names(section, prompts)
    longest = max(limit, *(len(prompt.token_ids) for prompt in prompts))
    settings = make_settings(section, hf_dir, chat_template(renderer), longest)
    seed = config.run.seed if config.generate.seed is None else config.generate.seed
    opening = check_opening(settings, prompts[0], seed)
    empty = [prompt.index for prompt in prompts if not len(prompt.token_ids)]
    if empty and not opening.messages:
        raise MsrlError(
            f"environment: returns no first messages, and row {empty[0]} of the input has no "
            "prompt. Add the column prompt or messages."
        )
    return settings


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
