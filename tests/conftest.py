"""Quiet threads before anything imports torch (spinning OpenMP threads cost ten times on a small
machine), and the order of the files.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

# The files that take longest, longest first: side by side, one that begins last would be waited for alone.
LONGEST = ("train_grpo", "training", "train_sft", "gsm8k", "mixture_training", "cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
