"""Sections of a worker of ROLL: its own keys, and the keys of model, training and strategy."""

from __future__ import annotations

from msrl.config.sources import Node
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus, Translation

SECTIONS = ("model_args", "training_args", "data_args", "generating_args", "strategy_args")


class Worker:
    """Keys of one worker, by section."""

    def __init__(self, translation: Translation, name: str, node: Node | None) -> None:
        self.name = name
        self.own = Keys.read(translation, "worker", node, name)
        self.sections = {name: self._section(translation, self.own, name) for name in SECTIONS}
        self.sections["strategy_config"] = self._section(
            translation, self.sections["strategy_args"], "strategy_config"
        )

    @classmethod
    def of(cls, keys: Keys, name: str) -> Worker:
        """Return the worker whose section is a key of a file."""
        entry = keys.get(name)
        if entry is not None:
            keys.translation.record(entry, KeyStatus.APPLIED, "key by key")
        return cls(keys.translation, name, entry.node if entry else None)

    def _section(self, translation: Translation, keys: Keys, name: str) -> Keys:
        entry = keys.get(name)
        path = f"{self.name}.{name}" if entry is None else entry.path
        return Keys.read(translation, name, entry.node if entry else None, path)

    def record_all(self, status: KeyStatus, text: str) -> None:
        """Record the remaining keys; those that msrl does not support have their own results."""
        for keys in (self.own, *self.sections.values()):
            for entry in keys:
                row = keys.translation.row(entry)
                if row.refuse or row.differs or row.dropped:
                    keys.translation.apply(entry)
                keys.translation.record(entry, status, text)
