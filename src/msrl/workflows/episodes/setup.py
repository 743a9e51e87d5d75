"""Setup of episodes before Ray starts: chat template, tool format and environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrl.config.sections.environment import EnvironmentConfig
from msrl.environments.base import EpisodeFault, Opening
from msrl.environments.pool import ENVIRONMENT_COLUMN, EnvironmentPool
from msrl.environments.tools import detect_format, unknown_format
from msrl.errors import MsrlError, nearest
from msrl.plan.run_plan import RunPlan
from msrl.processes.child import MAX_REPEATS
from msrl.registry import own
from msrl.rewards.failures import error_line
from msrl.rollout.episodes.messages import shorten_message
from msrl.rollout.episodes.runner import environment_row
from msrl.rollout.episodes.settings import EpisodeSettings, environment_sources
from msrl.rollout.episodes.template import EpisodeTemplate, open_template
from msrl.types import Message, Prompt


def episode_settings(plan: RunPlan, prompts: Iterable[Prompt]) -> EpisodeSettings | None:
    """Return the settings of episodes; None if a response is one turn.

    Each environment is opened once with a row of the data, which also shows whether it has tools.

    Raises:
        MsrlError: The environment cannot be opened, or the chat template cannot show its messages.
    """
    section = plan.config.environment
    if not section.is_on:
        return None
    prefix = next(iter(plan.data.blend), plan.data.train)  # a blend has one template
    manifest = None if prefix is None else plan.datasets[prefix].manifest
    chat_template = "" if manifest is None else manifest.chat_template
    longest = plan.rollout.max_prompt_tokens
    settings = make_settings(section, plan.tokenizer_dir, chat_template, longest)
    if not section.is_single_turn:
        check_openings(settings, prompts, plan.sampling.seed)
    return settings


def make_settings(
    section: EnvironmentConfig, tokenizer_dir: Path, chat_template: str, max_prompt_tokens: int
) -> EpisodeSettings:
    """Return the settings of episodes with a chat template; an empty one is the tokenizer's."""
    template = open_template(tokenizer_dir, chat_template, enable_thinking=section.enable_thinking)
    tool_format = own.located(section.tool_format or "") or detect_format(template.source) or ""
    opens_thought = not section.is_single_turn and template.opens_thought
    return EpisodeSettings(
        section, tokenizer_dir, chat_template, tool_format, max_prompt_tokens, opens_thought
    )


def check_openings(
    settings: EpisodeSettings, prompts: Iterable[Prompt], seed: int | None
) -> dict[str, Opening]:
    """Open each environment with its first row; return the openings by name.

    Raises:
        MsrlError: An environment cannot be opened, or the chat template cannot show its messages.
    """
    template = settings.template()
    rows = first_rows(settings.environment, prompts)
    openings = _open(settings, rows, seed)
    for name, opening in openings.items():
        if settings.environment.history == "template" and not opening.messages:
            label = settings.environment.name or settings.environment.path or name
            raise MsrlError(
                f"environment.history=template: {label} begins with the prompt of row "
                f"{rows[name].index}, whose messages are unknown. Set its option prompt_column, "
                "return messages from reset, or set history to append."
            )
        if opening.tools and not settings.tool_format:
            raise unknown_format(template.name)
        _check_opening(settings, opening, rows[name], template)
        if settings.environment.history == "separate":
            template.separate([Message("user", "q")])
    return openings


def first_rows(section: EnvironmentConfig, prompts: Iterable[Prompt]) -> dict[str, Prompt]:
    """Return the first row that selects each environment, by name.

    Environments of a mixture that no row selects get the first row that draws one by weight.
    """
    if not section.mixture:
        return {name: next(iter(prompts)) for name in environment_sources(section)}
    rows: dict[str, Prompt] = {}
    drawing: Prompt | None = None
    for prompt in prompts:
        name = prompt.extra.get(ENVIRONMENT_COLUMN)
        if name:
            rows.setdefault(name, prompt)
        elif drawing is None:
            drawing = prompt
        if len(rows) == len(section.mixture):
            break
    if drawing is not None:
        for name, entry in section.mixture.items():
            if entry.weight:
                rows.setdefault(name, _selecting(drawing, name))
    return rows


def _selecting(prompt: Prompt, name: str) -> Prompt:
    return replace(prompt, extra={**prompt.extra, ENVIRONMENT_COLUMN: name})


def _check_opening(
    settings: EpisodeSettings, opening: Opening, prompt: Prompt, template: EpisodeTemplate
) -> None:
    """Raise MsrlError if the chat template cannot show an opening, or only in too many tokens."""
    begins = bool(opening.messages)
    template.check(needs_tools=bool(opening.tools), lists_tools=begins)
    if begins:
        limit, longest = settings.environment.max_message_chars, settings.max_prompt_tokens
        messages = [shorten_message(message, limit) for message in opening.messages]
        length = len(template.conversation(messages, opening.tools))
        if length > longest:
            raise MsrlError(
                f"rollout.max_prompt_tokens={longest}: the environment begins the episode of row "
                f"{prompt.index} with {length} tokens. Raise it."
            )
    elif len(prompt.token_ids):
        _check_prompt(prompt, opening, template)


def _check_prompt(prompt: Prompt, opening: Opening, template: EpisodeTemplate) -> None:
    """Raise MsrlError if a prompt of the data does not mention the tools of its environment."""
    text = template.tokenizer.backend.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
    names = [str(tool["function"]["name"]) for tool in opening.tools]
    missing = [name for name in names if name not in text]
    if missing:
        raise MsrlError(
            f"environment: the prompt of row {prompt.index} does not show the tool {missing[0]}. "
            "Set environment.options.prompt_column, or preprocess the data with a column of tools "
            "or a template that has them, such as qwen_retool."
        )


@contextlib.contextmanager
def running_pool(settings: EpisodeSettings | None) -> Iterator[EnvironmentPool | None]:
    """Yield the processes of the environments; None if a response is one turn."""
    if settings is None:
        yield None
        return
    with settings.pool() as pool:
        pool.start()
        yield pool


def check_environment_names(section: EnvironmentConfig, prompts: Iterable[Prompt]) -> None:
    """Raise MsrlError if a row selects an environment that `environment.mixture` does not have."""
    for prompt in prompts if section.mixture else ():
        name = prompt.extra.get(ENVIRONMENT_COLUMN)
        if name and name not in section.mixture:
            raise MsrlError(
                f"environment.mixture: row {prompt.index} of the data selects the environment "
                f"{name!r}; {nearest(name, section.mixture)}. Add it, or correct the column "
                f"extra.{ENVIRONMENT_COLUMN}."
            )


def _open(
    settings: EpisodeSettings, prompts: Mapping[str, Prompt], seed: int | None
) -> dict[str, Opening]:
    """Return the opening of each environment with its row. They are closed again."""
    section = settings.environment
    openings: dict[str, Opening] = {}
    with settings.pool() as pool:
        pool.start()
        for name, prompt in prompts.items():
            row = environment_row(prompt, seed, keeps_name=bool(section.mixture))
            reply = _opening(pool, f"check {name}", row)
            if isinstance(reply, EpisodeFault):
                raise _refusal(section, name, prompt, reply)
            openings[name] = reply
    return openings


def _opening(pool: EnvironmentPool, episode_id: str, row: dict[str, Any]) -> Opening | EpisodeFault:
    """Return the opening of an episode, which begins again if its process was killed."""
    for _ in range(MAX_REPEATS):
        reply = pool.open(episode_id, row).result()
        if isinstance(reply, Opening) or reply.reason != "lost":
            return reply
        pool.close(episode_id)
    return pool.open(episode_id, row).result()


def _refusal(
    section: EnvironmentConfig, name: str, prompt: Prompt, fault: EpisodeFault
) -> MsrlError:
    key = f".mixture.{name}" if section.mixture else f"={section.name or section.path}"
    return MsrlError(
        f"environment{key}: cannot be reset with row {prompt.index} of the data "
        f"({fault.reason}): {error_line(fault.detail)}. Correct the environment or the data."
    )
