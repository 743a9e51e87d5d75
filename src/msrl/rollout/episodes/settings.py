"""Settings of the episodes of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msrl.config.sections.environment import EnvironmentConfig, MixtureEntry, SingleEnvironment
from msrl.environments.base import EnvironmentSource
from msrl.environments.pool import EnvironmentPool
from msrl.rollout.episodes.template import EpisodeTemplate, open_template


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of the episodes of one engine.

    Attributes:
        environment: Section of the configuration.
        tokenizer_dir: Folder of the tokenizer.
        chat_template: Template of the data (Jinja); empty for the tokenizer's own.
        tool_format: Format of tool calls that the template shows; empty if it is not known.
        max_prompt_tokens: Longest opening of an episode.
        opens_thought: True if the generation prompt of the template begins a thought.
    """

    environment: EnvironmentConfig
    tokenizer_dir: Path
    chat_template: str
    tool_format: str
    max_prompt_tokens: int
    opens_thought: bool = False

    @property
    def in_lockstep(self) -> bool:
        """True if the turns of all episodes start together.

        A single turn starts so as responses without an environment do.
        """
        return self.environment.lockstep or self.environment.is_single_turn

    def template(self) -> EpisodeTemplate:
        """Return the chat template of the episodes."""
        thinking = self.environment.enable_thinking
        return open_template(self.tokenizer_dir, self.chat_template, enable_thinking=thinking)

    def pool(self) -> EnvironmentPool:
        """Return the processes of the environments, which are not started yet."""
        section = self.environment
        return EnvironmentPool(
            environment_sources(section),
            tool_format=self.tool_format,
            opens_thought=self.opens_thought,
            max_running=section.max_running,
        )


def environment_sources(section: EnvironmentConfig) -> dict[str, EnvironmentSource]:
    """Return the environments of a section of the configuration by name."""
    if not section.mixture:
        return {"environment": _source(section, 1.0)}
    return {name: _mixed_source(entry) for name, entry in section.mixture.items()}


def _mixed_source(entry: MixtureEntry) -> EnvironmentSource:
    return _source(entry, entry.weight)


def _source(entry: SingleEnvironment, weight: float) -> EnvironmentSource:
    path = "" if entry.path is None else str(Path(entry.path).absolute())
    return EnvironmentSource(entry.name or "", path, entry.options, entry.timeout_s, weight)
