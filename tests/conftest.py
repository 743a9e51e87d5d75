"""Thread settings, import paths and file order of the tests.

Threads are limited before anything imports torch: on a small machine, spinning OpenMP threads are
ten times slower.
"""

import gc
import os
import sys

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
    "train_sft",
    "rewards_sandbox",
    "train_grpo_episodes",
    "sft_cluster",
    "serve",
    "mixture_training",
    "preprocess",
    "rollout_families",
    "cluster",
    "rewards_model",
    "chat",
    "checkpoint_distributed",
    "convert",
    "families",
    "rollout_vllm",
    "round_trips",
    "family_training",
    "light_installation",
    "documentation",
)


def pytest_configure() -> None:
    import imported_ranks

    imported_ranks.begin()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection visits modules and collected tests
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some extension modules report objects that are never freed
