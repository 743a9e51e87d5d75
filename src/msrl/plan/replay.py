"""Configuration of a replay: train-grpo from recorded rollouts, without the settings of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.tracking.rollouts import column_names, recorded_steps

_DATA = ("data.train", "data.blend", "data.shuffle")
# Keys that a replay does not read, because it samples and evaluates nothing.
_UNREAD = (
    *("checkpoint.keep_best", "cluster.roles.rollout", "data.curriculum"),
    *("data.eval", "environment.lockstep"),
    *(f"eval.{name}" for name in ("every_steps", "at_start", "patience", "prompts", "sampling")),
    *("eval.max_response_tokens", "eval.samples_per_prompt"),
    *("rollout.async", "rollout.engine", "rollout.weights"),
    *(f"rollout.filter.{name}" for name in ("refill", "max_refills", "extra_prompts")),
    *(f"rollout.sampling.{name}" for name in ("top_p", "top_k", "min_p", "stop", "seed")),
    *("train.offload.grads", "train.offload.params"),
)


def replay_config(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the defaults of all keys that a replay does not read.

    The second value has the names of those keys that were set to something else. The data is read
    for the images of a record only.
    """
    defaults, unread = Config(), list[str]()
    keys = _UNREAD if _has_images(config) else (*_DATA, *_UNREAD)
    for key in keys:
        value, default = _value(config, key), _value(defaults, key)
        unread += _differences(key, value, default)
        config = _replaced(config, key.split("."), default)
    if config.rollout.replay.rewards == "recorded":
        sources = config.reward.sources
        unread += [f"reward.sources.{n}.model" for n, each in enumerate(sources) if each.model]
        scoring = tuple(source for source in sources if source.model is None)
        config = _replaced(config, ["reward", "sources"], scoring)
    return config, tuple(unread)


def is_run(path: str) -> bool:
    """Return True if a value of `rollout.replay.path` is the folder of a run."""
    return Path(path).is_dir()


def recorded_files(path: str) -> list[Path]:
    """Return the files of a value of `rollout.replay.path`. Raises MsrlError if there are none."""
    return recorded_steps(Path(path)) if is_run(path) else [Path(path)]


def _has_images(config: Config) -> bool:
    """Return True if a record has images. Its errors are reported when it is opened."""
    path = str(config.rollout.replay.path)
    try:
        return is_run(path) and any("images" in column_names(file) for file in recorded_files(path))
    except MsrlError:
        return False


def _value(section: Any, key: str) -> Any:
    for name in key.split("."):
        section = getattr(section, name)
    return section


def _replaced(section: Any, names: list[str], value: object) -> Any:
    """Return a section with another value of a key, given as the names of its parts."""
    name, *rest = names
    new = _replaced(getattr(section, name), rest, value) if rest else value
    return cast("BaseModel", section).model_copy(update={name: new})


def _differences(key: str, value: Any, default: Any) -> Iterator[str]:
    """Yield the names of the keys whose values are not the defaults."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            own = getattr(value, name), getattr(default, name)
            yield from _differences(f"{key}.{name}", *own)
    elif value != default:
        yield key
