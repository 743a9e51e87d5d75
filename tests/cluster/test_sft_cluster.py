"""msrl train-sft on two Ray nodes with one device each is bitwise equal to one machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from msrl.cluster import launch
from msrl.free_ports import free_port
from msrl.trainer.checkpointing.resume import SavedTraining
from support import assert_mentions
from tiny_qwen2 import save_model
from training_runs import Command, metrics, rows, write_config, write_rows

pytestmark = pytest.mark.slow
RESOURCE = "msrl_device"
STEPS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of two nodes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("MSRL_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        address = f"127.0.0.2:{free_port()}"
        port = int(address.split(":")[1])
        try:
            with pytest.MonkeyPatch.context() as elsewhere:
                elsewhere.chdir("/")  # runs have another working directory
                launch.up(
                    host="127.0.0.2",
                    port=port,
                    dashboard_port=free_port(),
                    devices=1,
                    platform_resource=RESOURCE,
                )
                launch.join(address, host="127.0.0.3", devices=1, platform_resource=RESOURCE)
            yield address
        finally:
            launch.down()
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with a model and 24 examples; paths in configurations are relative."""
    from msrl.cli import app

    working_dir = tmp_path_factory.mktemp("sft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(working_dir)
        save_model(working_dir / "hf", tied=False, positions=256)
        examples = [
            {"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 7)}
            for i in range(24)
        ]
        write_rows(working_dir / "data.jsonl", examples)
        data = [
            "--input",
            "data.jsonl",
            "--tokenizer",
            "hf",
            "--handler",
            "alpaca",
            "--template",
            "qwen",
            "--output-prefix",
            "data",
        ]
        app.app(["preprocess", *data], standalone_mode=False)
        yield working_dir


def settings(name: str, address: str | None, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run at TP 2, on both nodes if there is an address."""
    nodes = {} if address is None else {"address": address, "nodes": 2, "devices_per_node": 1}
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "hf", "dtype": "float32"},
        "data": {"train": "data"},
        "cluster": {
            "platform": "cpu",
            "rpc_timeout_s": 120.0,
            "env": {"OMP_NUM_THREADS": "1"},  # the same order of sums on one and two machines
            **nodes,
        },
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 4,
            "optimizer": {"lr": 1e-3},
            "parallel": {"tp": 2},
        },
        "checkpoint": {"every_steps": None},
    }
    return {
        "run": {"name": name, "dir": "runs"},
        **{key: {**value, **changes.get(key, {})} for key, value in sections.items()},
    }


def start(folder: Path, name: str, address: str | None, **changes: dict[str, Any]) -> Command:
    return Command(
        "train-sft",
        "-c",
        str(write_config(folder / f"{name}.yaml", settings(name, address, **changes))),
        log=folder / "log",
        is_on_one_machine=address is None,
    )


@pytest.fixture(scope="module")
def local_run(folder: Path) -> Path:
    """Folder of a run on one machine."""
    from msrl.cli import app

    file = write_config(folder / "local.yaml", settings("local", None))
    app.app(["train-sft", "-c", str(file)], standalone_mode=False)
    return folder / "runs" / "local"


def checksums(run: Path) -> dict[str, Any]:
    """Return the checksums of weights, optimizer moments and random-number states."""
    return {
        key: value
        for key, value in SavedTraining(run / "checkpoints", STEPS).state().items()
        if key != "extra"
    }


def test_a_run_on_two_machines_equals_that_on_one(folder: Path, local_run: Path, cluster: str):
    command = start(folder, "spread", cluster)
    assert command.wait() == 0, command.output()
    run = folder / "runs" / "spread"
    assert metrics(run) == metrics(local_run) and len(rows(run)) == STEPS
    assert checksums(run) == checksums(local_run)


@pytest.mark.full
def test_an_interrupt_saves_after_the_current_step_and_the_resumed_run_is_bitwise_equal(
    folder: Path, local_run: Path, cluster: str
):
    command = start(folder, "interrupted", cluster)
    run = folder / "runs" / "interrupted"
    command.when(lambda: len(rows(run)) >= 2)
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.wait() == 130, command.output()
    done = len(rows(run))
    assert (
        done < STEPS
        and re.search(rf"(?i)saved .*step {done}\b", command.output())
        and "Traceback" not in command.output()
    )
    command = start(folder, "interrupted", cluster, checkpoint={"resume": "auto"})
    assert command.wait() == 0, command.output()
    assert metrics(run) == metrics(local_run) and checksums(run) == checksums(local_run)


def ranks_in(address: str) -> list[psutil.Process]:
    """Return the training ranks of this cluster, whose parents are its raylets."""
    ranks = list[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        if "ray::TrainActor" in " ".join(process.info["cmdline"] or ()):
            with suppress(psutil.Error):  # it has ended
                raylet = process.parent()
                if raylet is not None and f"gcs-address={address}" in " ".join(raylet.cmdline()):
                    ranks.append(process)
    return ranks


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_and_frees_the_devices(folder: Path, cluster: str):
    command = start(folder, "dead", cluster, train={"steps": 10000}, cluster={"max_restarts": 0})
    command.when(lambda: len(rows(folder / "runs" / "dead")) >= 2)
    ranks = ranks_in(cluster)
    assert len(ranks) == 2
    ranks[1].kill()
    killed = time.monotonic()
    assert command.wait() == 1
    assert time.monotonic() - killed < 60
    assert "training rank" in command.output() and "failed" in command.output()
    assert not [rank for rank in ranks if rank.is_running()]


@pytest.mark.full
def test_more_ranks_than_devices_are_refused_with_the_number_of_devices(folder: Path, cluster: str):
    command = start(
        folder,
        "large",
        cluster,
        cluster={
            "address": cluster,
            "nodes": 2,
            "devices_per_node": 2,
            "wait_for_nodes_s": 0.0,
        },
    )
    assert command.wait() == 2
    assert_mentions(command.output(), "2, 2", "msrl_device", "127.")
    assert "Traceback" not in command.output()
