"""Setup of episodes before Ray starts: chat template, tool format and environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from msrl.config.sections.environment import EnvironmentConfig
from msrl.environments.base import EpisodeFault, Opening
from msrl.environments.pool import ENVIRONMENT_COLUMN, EnvironmentPool
from msrl.environments.tools import detect_format
from msrl.errors import MsrlError, nearest
from msrl.plan.run_plan import RunPlan
from msrl.rewards.failures import error_line
from msrl.rollout.episodes.runner import environment_row
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.episodes.template import EpisodeTemplate, open_template
from msrl.types import Prompt

_DEFAULT_FORMAT = "hermes"


def episode_settings(plan: RunPlan, prompt: Prompt) -> EpisodeSettings | None:
    """Return the settings of episodes; None if a response is one turn.

    The environment is opened once with a row of the data, which also shows whether it has tools.

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
        check_opening(settings, prompt, plan.sampling.seed)
    return settings


def make_settings(
    section: EnvironmentConfig, tokenizer_dir: Path, chat_template: str, max_prompt_tokens: int
) -> EpisodeSettings:
    """Return the settings of episodes with a chat template; an empty one is the tokenizer's."""
    tool_format = section.tool_format
    if tool_format is None:
        template = open_template(tokenizer_dir, chat_template)
        tool_format = detect_format(template.source) or _DEFAULT_FORMAT
    return EpisodeSettings(section, tokenizer_dir, chat_template, tool_format, max_prompt_tokens)


def check_opening(settings: EpisodeSettings, prompt: Prompt, seed: int | None) -> Opening:
    """Open the environment with a row and return its first messages, which the template can show.

    Raises:
        MsrlError: The environment cannot be opened, or the chat template cannot show its messages.
    """
    template = open_template(settings.tokenizer_dir, settings.chat_template)
    opening = _open(settings, prompt, seed)
    begins = bool(opening.messages)
    template.check(needs_tools=bool(opening.tools), lists_tools=begins)
    if begins:
        template.conversation(opening.messages, opening.tools)
    elif len(prompt.token_ids):
        _check_prompt(prompt, opening, template)
    return opening


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


def _open(settings: EpisodeSettings, prompt: Prompt, seed: int | None) -> Opening:
    """Return the opening of an episode, whose environment is closed again."""
    section = settings.environment
    with settings.pool() as pool:
        pool.start()
        row = environment_row(prompt, seed, keeps_name=bool(section.mixture))
        reply = pool.open("check", row).result()
    if isinstance(reply, EpisodeFault):
        name = section.name or section.path or ", ".join(section.mixture)
        raise MsrlError(
            f"environment={name}: cannot be reset with row {prompt.index} of the data "
            f"({reply.reason}): {error_line(reply.detail)}. Correct the environment or the data."
        )
    return reply
