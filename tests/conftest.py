"""Thread settings, import paths and file order of the tests.

Threads are limited before anything imports torch: on a small machine, spinning OpenMP threads are
ten times slower.
"""

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import guardian
from support import ROOT, folders

# Collecting allocates a million objects that live until the end, and few cycles.
gc.disable()
guardian.begin()
sys.path[:0] = folders()
sys.path.append(str(ROOT))  # for the package `benchmarks`

# The slowest files, slowest first. In parallel runs, a slow file at the end would run alone.
LONGEST = (
    "train_grpo",
    "training",
    "replay",
    "train_sft",
    "rewards_sandbox",
    "train_grpo_episodes",
    "sft_cluster",
    "serve",
    "family_training",
    "mixture_training",
    "cluster",
    "image_training",
    "rollout_vllm",
    "image_grpo",
    "engine_loop",
    "image_sft",
    "vision_engine",
    "preprocess",
    "rollout_families",
    "rewards_model",
    "chat",
    "checkpoint_distributed",
    "convert",
    "families",
    "round_trips",
    "light_installation",
    "documentation",
)


def pytest_configure() -> None:
    import imported_ranks

    imported_ranks.begin()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_tables(items)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def mark_tables(items: Sequence[Any]) -> None:
    """Mark cases `full` that are not in the sample of a test with the mark `sample(n)`."""
    tables = defaultdict[object, list[Any]](list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tables[item.function].append(item)
    for cases in tables.values():
        (size,) = cases[0].get_closest_marker("sample").args
        random.Random(0).shuffle(cases)
        seen = set[tuple[str, int]]()
        for _ in range(min(size, len(cases))):
            case = max(cases, key=lambda case: len(case.callspec.indices.items() - seen))
            seen |= case.callspec.indices.items()
            cases.remove(case)
        for case in cases:
            case.add_marker("full")


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection visits modules and collected tests
    gc.set_threshold(50_000)  # with the usual 700, parsing all sources takes three times as long
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some extension modules report objects that are never freed
