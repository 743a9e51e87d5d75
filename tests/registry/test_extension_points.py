"""Every plugin is one file and one row: each file has a row, and reproduces it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import benchmark_rows
import families
import golden
import mixture_families
import scripted_episodes
import test_reasoning_tasks
import test_rewards_verifiers
from msrl import registry
from msrl.config.presets import preset_names, preset_values
from msrl.config.templates import template_names
from msrl.data.handlers import make_handler
from msrl.data.render import make_renderer
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, text_tokenizer
from msrl.models.families import families as architectures
from msrl.tracking.tracker import open_trackers
from msrl.types import Conversation, Message, StepReport
from support import assert_mentions
from tiny_qwen2 import make_tokenizer

HANDLERS, TRACKERS = "msrl.data.handlers", "msrl.tracking.trackers"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugins: its names, the names with a row, and the table to edit."""

    names: Callable[[], Collection[str]]
    rows: Collection[str]
    table: str


def plugins(package: str) -> Callable[[], Collection[str]]:
    return lambda: registry.names(package)


VERIFIERS = {
    *test_rewards_verifiers.CASES,
    *test_rewards_verifiers.NEEDS_A_SANDBOX,
    *test_rewards_verifiers.NEEDS_A_PACKAGE,
}
FAMILIES = {row.architecture for row in (families.FAMILIES | mixture_families.MIXTURES).values()}
KINDS = {
    "advantage estimator": Kind(
        plugins("msrl.algorithms.advantages"),
        golden.ESTIMATORS,
        "ESTIMATORS in tests/helpers/golden.py",
    ),
    "policy loss": Kind(
        plugins("msrl.algorithms.losses"), golden.LOSSES, "LOSSES in tests/helpers/golden.py"
    ),
    "preference loss": Kind(
        plugins("msrl.algorithms.preference"),
        golden.PREFERENCES,
        "PREFERENCES in tests/helpers/golden.py",
    ),
    "divergence": Kind(
        plugins(registry.DIVERGENCES), golden.DIVERGENCES, "DIVERGENCES in tests/helpers/golden.py"
    ),
    "dataset handler": Kind(
        plugins(HANDLERS), golden.HANDLERS, "HANDLERS in tests/helpers/golden.py"
    ),
    "sampler": Kind(
        plugins(registry.SAMPLERS), golden.SAMPLERS, "SAMPLERS in tests/helpers/golden.py"
    ),
    "package of tasks": Kind(
        plugins(registry.TASKS),
        test_reasoning_tasks.TASKS,
        "TASKS in tests/workflows/preprocess/test_reasoning_tasks.py",
    ),
    "tracker": Kind(plugins(TRACKERS), golden.TRACKERS, "TRACKERS in tests/helpers/golden.py"),
    "prompt template": Kind(
        template_names, golden.TEMPLATES, "TEMPLATES in tests/helpers/golden.py"
    ),
    "preset": Kind(preset_names, golden.PRESETS, "PRESETS in tests/helpers/golden.py"),
    "verifier": Kind(
        plugins("msrl.rewards.verifiers"),
        VERIFIERS,
        "CASES in tests/rewards/test_rewards_verifiers.py",
    ),
    "environment": Kind(
        plugins(registry.ENVIRONMENTS),
        scripted_episodes.ENVIRONMENTS,
        "ENVIRONMENTS in tests/helpers/scripted_episodes.py",
    ),
    "benchmark": Kind(
        plugins(registry.BENCHMARKS),
        benchmark_rows.ROWS,
        "ROWS in tests/workflows/evaluate/benchmark_rows.py",
    ),
    "tool format": Kind(
        plugins(registry.TOOL_FORMATS),
        scripted_episodes.TOOL_FORMATS,
        "TOOL_FORMATS in tests/helpers/scripted_episodes.py",
    ),
    "architecture": Kind(
        lambda: list(architectures()),
        FAMILIES,
        "FAMILIES in tests/helpers/models/families.py (mixtures: MIXTURES in mixture_families.py)",
    ),
}


def missing_rows(kind: str) -> str:
    """Return what to add for plugins without a row; empty if each has one."""
    missing = sorted(set(KINDS[kind].names()) - set(KINDS[kind].rows))
    return f"add a row for {', '.join(missing)} to {KINDS[kind].table}" if missing else ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_plugin_has_a_row(kind: str) -> None:
    message = missing_rows(kind)
    assert not message, message


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_a_plugin(kind: str) -> None:
    assert not set(KINDS[kind].rows) - set(KINDS[kind].names())


def test_a_missing_row_is_asked_for_with_the_file_to_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(golden.LOSSES, "tis")
    assert_mentions(missing_rows("policy loss"), "tis", "LOSSES", "tests/helpers/golden.py")


@pytest.mark.parametrize("name", golden.TEMPLATES)
def test_a_template_renders_its_golden_tokens_and_mask(name: str, tmp_path: Path) -> None:
    template, tokenizer = load_template(name), make_tokenizer()
    tokens = [token for token in template.special if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": tokens})
    turns = (Message("user", "Hi"), Message("assistant", "Yes"))
    tokenizer.save_pretrained(tmp_path)
    renderer = make_renderer(template, text_tokenizer(load_tokenizer(tmp_path)))
    (example,) = renderer.examples([Conversation(turns)])
    before, trained, after = golden.TEMPLATES[name].replace("]]", "[[").split("[[")
    positions = example.loss_mask.nonzero()[0]
    first, last = int(positions[0]), int(positions[-1])
    assert positions.tolist() == list(range(first, last + 1))
    head, _, tail = before.partition("…")
    context = tokenizer.decode(example.token_ids[:first])
    assert context.startswith(head) and context.endswith(tail)
    assert "…" in before or context == before
    assert tokenizer.decode(example.token_ids[first : last + 1]) == trained
    assert tokenizer.decode(example.token_ids[last + 1 :]) == after


@pytest.mark.parametrize("name", golden.HANDLERS)
def test_a_handler_reads_its_golden_row(name: str) -> None:
    row = golden.HANDLERS[name]
    handler = make_handler(name, kind=None, map_keys={}, options={})
    result = handler.converter()(row.row)
    if row.labels:
        assert (result.text, result.labels) == (row.text, row.labels)
        return
    if row.text is not None:
        assert result == row.text
        return
    if row.answers:
        sides = [[(m.role, m.content) for m in side.messages] for side in result.conversations]
        assert sides == [[*row.turns, ("assistant", answer)] for answer in row.answers]
        assert (result.value, result.weight) == (row.value, 1.0)
        return
    turns = tuple((message.role, message.content) for message in result.messages)
    assert (turns, result.answer) == (row.turns, row.answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.TRACKERS)
def test_a_tracker_writes_what_its_reader_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = golden.TRACKERS[name]
    pytest.importorskip(row.package)
    for variable, value in row.env:
        monkeypatch.setenv(variable, value)
    (tracker,) = open_trackers((name,), tmp_path)
    for step in (1, 2, 3):
        tracker.log(StepReport(step, {"train/loss": 2.0 * step}))
    tracker.close()
    assert row.read(tmp_path) == [(1, 2.0), (2, 4.0), (3, 6.0)]


@pytest.mark.parametrize("name", golden.PRESETS)
def test_a_preset_has_the_numbers_of_its_paper(name: str) -> None:
    assert dict(dotted_leaves(preset_values(name))) == golden.PRESETS[name]


def dotted_leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested mappings by dotted key."""
    leaves: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            leaves += dotted_leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves
