"""Published throughput beside predictions: the table of docs/planning.md.

The efficiencies of the profiles are older than these rows and not changed because of them. Rows are
from Megatron-Bridge's docs/performance-summary.md (25.11) and MindSpeed-LLM's
docs/en/pytorch/features/README.md with the scripts that it names.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from msrl.config.loader import load
from msrl.layouts.choice import Request, _lengths, _search, layout_text
from msrl.layouts.profile import read_profile
from msrl.layouts.search import Devices
from msrl.plan.run_plan import resolve
from support import ROOT, shared_data

PAGE = ROOT / "docs" / "planning.md"


@dataclass(frozen=True)
class Row:
    """A published row: tokens per second and device of a layout."""

    source: str
    model: str
    config: str  # of the shared folder
    profile: str
    devices: Devices
    length: int
    global_batch: int
    layout: tuple[str, ...]  # keys of `train`
    published: float


ROWS = (
    Row(
        "Megatron-Bridge", "DeepSeek-V3", "deepseek-ai--DeepSeek-V3_config.json", "gb200",
        Devices(64, 4), 4096, 4096,
        ("parallel.pp=4", "parallel.vpp=4", "parallel.ep=64", "parallel.noop_layers=[61,62,63]"),
        3139,
    ),
    Row(
        "Megatron-Bridge", "Qwen3-235B-A22B", "Qwen--Qwen3-235B-A22B_config.json", "gb200",
        Devices(64, 4), 4096, 8192,
        ("parallel.pp=8", "parallel.vpp=4", "parallel.ep=32", "parallel.noop_layers=[94,95]"),
        4916,
    ),
    Row(
        "MindSpeed-LLM", "Qwen3-30B-A3B", "Qwen--Qwen3-30B-A3B_config.json", "ascend-a2",
        Devices(2, 8), 4096, 256,
        ("parallel.pp=4", "parallel.ep=4", "recompute.granularity=full"),
        2318,
    ),
    Row(
        "MindSpeed-LLM", "DeepSeek-V3", "deepseek-ai--DeepSeek-V3_config.json", "ascend-a3",
        Devices(32, 16), 4096, 3840,
        (
            "parallel.tp=2", "parallel.sp=true", "parallel.pp=8", "parallel.vpp=4",
            "parallel.ep=32", "parallel.etp=1", "parallel.noop_layers=[61,62,63]",
            "recompute.granularity=full", "offload.optimizer=true",
        ),
        915,
    ),
)  # fmt: skip


def table_row(row: Row, folder: Path) -> str:
    """Return a row of the page: the published and the predicted speed, and the error."""
    shutil.copyfile(shared_data("configs", "aic", row.config), folder / "config.json")
    keys = [f"train.{key}" for key in (f"global_batch={row.global_batch}", *row.layout)]
    sets = [f"model.path={folder}", "model.dtype=bfloat16", f"data.seq_length={row.length}", *keys]
    resolved = load(sets=sets)
    plan = resolve(resolved.config, "train-sft")
    request = Request(row.devices, read_profile(row.profile))
    search = _search(resolved, plan, request, _lengths(plan, None))
    train = resolved.config.train
    update = search.model.update(train)
    predicted = update.tokens / update.seconds / row.devices.total
    full = ", full recomputation" if train.recompute.granularity == "full" else ""
    return (
        f"| {row.source} | {row.model} | {row.devices} `{row.profile}` | "
        f"{layout_text(train)}{full} | {row.length:,} | {row.published:,.0f} | {predicted:,.0f} | "
        f"{predicted / row.published - 1:+.0%} |"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source} {row.model}")
def test_the_page_lists_a_published_row_with_its_error(row: Row, tmp_path: Path):
    assert table_row(row, tmp_path) in PAGE.read_text(encoding="utf-8").splitlines()
