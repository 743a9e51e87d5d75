"""Log-probabilities of the reference model: computed in every step, or once before the training.

Precomputed ones are stored in the folder of the run, in a file whose name is a digest of the data,
the reference's weights and the settings that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from msrl.data.manifest import fingerprint
from msrl.files import atomic_write
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.trainer.objective.batches import BatchLimits
from msrl.workflows.preference.batches import PreferenceBatch, Sums, answer_logprobs
from msrl.workflows.preference.rows import PreferenceRows
from msrl.workflows.training.resume_checks import weights_digest
from msrl.workflows.training.settings import reference_rank_settings
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import open_trainers, save_plan

ReferenceLogprobs = Callable[[PreferenceBatch], "Sums | None"]
_ROWS_AT_ONCE = 64  # per data-parallel rank, between two notes on the progress


def forward_limits(plan: RunPlan, num_sides: int) -> BatchLimits:
    """Return the limits of a pass without gradients; they count sequences."""
    train = plan.train
    num_rows = train.forward_micro_batch or train.micro_batch
    return BatchLimits.of(train, num_rows * num_sides)


class StoredReference:
    """Precomputed log-probabilities of all rows that a run reads, by dataset and row."""

    def __init__(self, plan: RunPlan, sources: Sequence[PreferenceRows]) -> None:
        self._plan = plan
        self._sources = {rows.dataset.prefix: rows for rows in sources}
        self._numbers = {
            prefix: sorted(
                {n for r in sources if r.dataset.prefix == prefix for row in r.members for n in row}
            )
            for prefix in self._sources
        }
        self._values: dict[str, dict[int, tuple[float, ...]]] = {}

    @property
    def path(self) -> Path:
        """File of the log-probabilities."""
        config = self._plan.config
        assert self._plan.reference is not None
        key = {
            "data": {
                prefix: [fingerprint(each) for each in rows.dataset.prefixes]
                for prefix, rows in self._sources.items()
            },
            "rows": self._numbers,
            "weights": weights_digest(self._plan.reference.weights),
            "dtype": config.model.dtype,
            "seq_length": config.data.seq_length,
        }
        if config.model.logits_dtype is not None:
            key["logits_dtype"] = config.model.logits_dtype
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16)
        return self._plan.run_dir / f"reference_{digest.hexdigest()}.npz"

    def load(self, platform: Platform, note: Callable[[str], None]) -> None:
        """Read the log-probabilities, or compute and store them first."""
        path = self.path
        if not path.is_file():
            note("Computing the log-probabilities of the reference")
            settings = reference_rank_settings(self._plan, platform.name)
            with open_trainers(self._plan.config, settings, platform) as ranks:
                ranks.start(None, save_plan(self._plan))
                computed = {prefix: self._compute(ranks, prefix) for prefix in self._sources}
            _write(path, computed)
            note(f"Saved the log-probabilities of the reference to {path}")
        with np.load(path) as file:
            for number, prefix in enumerate(self._sources):
                rows = file[f"logprobs_{number}"].tolist()
                pairs = zip(self._numbers[prefix], map(tuple, rows), strict=True)
                self._values[prefix] = dict(pairs)

    def lookup(self, rows: PreferenceRows) -> ReferenceLogprobs:
        """Return the function that looks up the rows of a dataset."""
        values = self._values[rows.dataset.prefix]

        def look_up(batch: PreferenceBatch) -> Sums:
            return np.array([value for number in batch.numbers for value in values[number]])

        return look_up

    def _compute(self, ranks: TrainerGroup, prefix: str) -> Sums:
        """Return the log-probabilities of all rows of a dataset, [rows, sides]."""
        rows, numbers = self._sources[prefix], self._numbers[prefix]
        count, results = _ROWS_AT_ONCE * ranks.dp_size, list[Sums]()
        for start in range(0, len(numbers), count):
            examples = [rows.examples(number) for number in numbers[start : start + count]]
            sides = [side for example in examples for side in example.sides]
            limits = forward_limits(self._plan, len(examples[0].sides))
            logprobs = answer_logprobs(ranks, sides, limits, reference=True)
            results.append(logprobs.reshape(len(examples), -1))
        return np.concatenate(results)


def _write(path: Path, values: Mapping[str, Sums]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        arrays = {f"logprobs_{number}": array for number, array in enumerate(values.values())}
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def on_the_fly(plan: RunPlan, trainers: TrainerGroup) -> ReferenceLogprobs:
    """Return the function that computes the log-probabilities of a batch on the ranks."""

    def compute(batch: PreferenceBatch) -> Sums:
        limits = forward_limits(plan, len(batch.examples[0].sides))
        return answer_logprobs(trainers, batch.sides, limits, reference=True)

    return compute


def no_reference(batch: PreferenceBatch) -> None:
    """Return nothing, for losses without a reference."""
