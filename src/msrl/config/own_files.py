"""Python files of users that a configuration names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msrl.config.schema import Config
from msrl.registry import own


def own_names(config: Config) -> dict[str, str]:
    """Return every `path/file.py:NAME` of a configuration by its key."""
    algo, environment = config.algo, config.environment
    names = {
        "algo.advantage.estimator": algo.advantage.estimator,
        "algo.distill.divergence": algo.distill.divergence,
        "algo.policy_loss": algo.policy_loss,
        "algo.preference.loss": algo.preference.loss,
        "environment.path": environment.path,
        "environment.tool_format": environment.tool_format,
        "preprocess.handler": config.preprocess.handler,
    }
    for name, entry in environment.mixture.items():
        names[f"environment.mixture.{name}.path"] = entry.path
    for number, source in enumerate(config.reward.sources):
        names[f"reward.sources.{number}"] = source.function or source.verifier
    return {key: name for key, name in names.items() if name is not None and own.is_own(name)}


def own_digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of every Python file of the user by its path."""
    files = {own.split(name)[0] for name in own_names(config).values()}
    return {
        file: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in sorted(files)
        if Path(file).is_file()
    }
