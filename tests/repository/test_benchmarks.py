"""Arithmetic, memory measurement and configurations of the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import asynchronous, device, device_commands, measure, results
from benchmarks.__main__ import CASES, detail_lines
from benchmarks.cases import Sample
from benchmarks.device_jobs import SCALES, Facts, Speed, Trained, Training, Work, classify_kernel
from benchmarks.measure import BenchError, quiet_environment, timed
from benchmarks.results import figure

from support import ROOT, assert_mentions, mentions

BY_NAME = {case.name: case for case in CASES}


def measured_row(name: str, ours: float, **peers: float) -> str:
    """Return the first table row of a benchmark with these values."""
    samples = {"ours": [Sample(ours)], **{peer: [Sample(value)] for peer, value in peers.items()}}
    return next(results.rows(results.result(BY_NAME[name], samples)))


def test_goals_are_upper_limits_for_seconds_and_lower_limits_for_rates() -> None:
    assert measured_row("convert", 5.0, copy_floor=4.0).endswith("| 1.25 | at most 1.25 | yes |")
    assert measured_row("convert", 5.1, copy_floor=4.0).endswith("| 1.27 | at most 1.25 | **no** |")
    assert measured_row("preprocess", 300.0, tokenize_ceiling=500.0).endswith(
        "| 0.60 | at least 0.9 | **no** |"
    )
    assert measured_row("sft-fp32", 0.5, raw_hf=1.0, trl_sft=1.0).endswith(
        "| 0.50 | at most 0.75 | yes |"
    )


def test_written_results_replace_only_benchmarks_that_ran(tmp_path: Path) -> None:
    path, stack = tmp_path / "results.json", {"date": "2026-01-01", "machine": "2 cores"}
    samples = {"ours": [Sample(5.0, {"MB": 3.0})], "copy_floor": [Sample(4.0)]}
    first = results.result(BY_NAME["convert"], samples)
    results.write({"convert": first}, stack, path)
    results.write({"convert-small": first}, stack | {"date": "2026-01-02"}, path)
    saved = json.loads(path.read_text())
    assert saved["convert"]["stack"]["date"] == "2026-01-01"
    assert saved["convert-small"]["peers"]["copy_floor"]["ratio"] == 1.25
    assert results.saved_table(path).count(f"{results.LABELS['copy_floor']} 4 s") == 2
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{results.BEGIN}old\n{results.END}after\n")
    results.update_readme(path, readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert results.saved_table(path) in text


def test_the_readme_of_the_benchmarks_has_the_table_of_the_saved_results() -> None:
    assert results.saved_table() in results.README.read_text(), "run `nox -s bench -- --write`"


def test_every_peer_has_a_label() -> None:
    assert {peer for case in CASES for peer in case.peers} == set(results.LABELS)


@pytest.mark.parametrize(("step_s", "reached"), [(0.65, "yes"), (0.66, "no")])
def test_the_goal_of_asynchronous_steps_is_a_ratio_of_medians(step_s: float, reached: str) -> None:
    runs = {
        0: [asynchronous.StepSeconds(step, 0.5) for step in (9.0, 1.0, 0.1)],
        1: [asynchronous.StepSeconds(step, 0.5) for step in (step_s, 7.0, 0.2)],
    }
    assert asynchronous.ratio(runs) == pytest.approx(step_s)
    lines = asynchronous.table(0.5, runs)
    assert_mentions(lines[-1], f"{step_s:.2f}", "0.65", f"Reached: {reached}")
    assert "| synchronous | 1 s | 9, 1, 0.1 |" in lines


def test_all_samples_are_printed() -> None:
    samples = {
        "ours": [Sample(1.0, {"MB": 5.0}), Sample(3.0, {"MB": 7.0})],
        "copy_floor": [Sample(2.0), Sample(2.5)],
    }
    lines = detail_lines(BY_NAME["convert"], samples)
    assert lines == [
        "- convert, ours: 1, 3 s",
        "- convert, copy_floor: 2, 2.5 s",
        "- convert, ours besides: MB 6",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(0.50321, "0.503"), (1234.5, "1,234"), (11.26, "11.3"), (99.96, "100")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.slow
def test_peak_memory_counts_what_a_child_allocates_and_not_what_it_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big").write_bytes(bytes(300_000_000))
    child = (
        "import numpy as np, os, time; m = np.memmap('big', mode='r'); m.sum(); "
        "a = np.ones(25_000_000); end = time.monotonic() + 60\n"
        "while not os.path.exists('measured') and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.5)"
    )
    now = measure._Memory._now

    def now_and_tell(memory: Any) -> int:
        num_bytes = now(memory)
        if num_bytes > 200e6:
            (tmp_path / "measured").touch()
        return num_bytes

    monkeypatch.setattr(measure._Memory, "_now", now_and_tell)
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = timed([sys.executable, "-c", code], environment=quiet_environment(), cwd=tmp_path)
    assert (tmp_path / "measured").exists()
    assert 200e6 < done.peak_anonymous_bytes < 300e6
    assert done.seconds > 0.5


def test_a_program_that_fails_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=mentions("exit 3", "no such model")):
        timed(
            [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"],
            environment=quiet_environment(),
            cwd=tmp_path,
        )


def test_an_unknown_benchmark_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "sftt"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert_mentions(done.stderr, "'sftt'", "convert-small", "preprocess")


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks").glob("*.yaml")), ids=lambda file: file.stem
)
def test_the_configurations_are_valid(file: Path) -> None:
    from msrl.cli.configuration import load_configuration as load

    load([str(file)], [])


@pytest.mark.slow
@pytest.mark.full
def test_the_device_benchmark_agrees_with_itself_on_cpu(tmp_path: Path) -> None:
    written = tmp_path / "device.json"
    options = ["--platform", "cpu", "--shapes", "tiny", "--write", str(written)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "device", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(written.read_text())
    assert [(row["way"], row["dtype"]) for row in results["parity"]] == [
        (job.name, job.dtype) for job in SCALES["tiny"].trainings(has_fused=False)
    ]
    assert all(
        row["losses"][-1] < row["losses"][0] and len(row["grad_norms"]) == 10
        for row in results["parity"]
    )
    assert all(row["loss_off"] < 1e-6 for row in results["parity"] if row["dtype"] == "float32")
    assert all(row["loss_off"] > 0 for row in results["parity"] if row["dtype"] == "bfloat16")
    assert [row["loss_off"] for row in results["commands"]] == [0.0, 0.0]
    (speed,) = results["speed"]
    assert sum(speed["costs"].values()) == pytest.approx(1) and "matrix products" in speed["costs"]
    assert (
        "| saved and resumed | bfloat16 | torch |" in done.stdout
        and done.stdout.count("\n| tiny | ") == 1 + device.NUM_COSTS
    )


def test_commands_on_a_device_are_compared_by_their_losses() -> None:
    exact, close = device_commands.JOBS[2], device_commands.JOBS[0]
    equal = device_commands.row(exact, [2.0, 1.0], [2.0, 1.0])
    assert equal["reached"] and not device_commands.row(exact, [2.0, 1.1], [2.0, 1.0])["reached"]
    off = device_commands.row(close, [2.0, 1.00005], [2.0, 1.0])
    assert off["reached"] and off["loss_off"] == pytest.approx(5e-5)
    failed = device_commands.row(close, "no device", [2.0])
    *_, first, second, third = device_commands.table([equal, off, failed])
    assert "| none |" in first and "| 5.0e-05 | 0.0001 |" in second
    assert "failed: no device" in third and "**no**" in third


def test_inputs_of_the_commands_that_cannot_be_made_are_reported_for_each_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("no space")

    monkeypatch.setattr(device_commands, "make_inputs", fail)
    rows = list(device_commands.run_jobs(tmp_path / "commands", "cpu"))
    assert [row["error"] for row in rows] == ["no space"] * len(device_commands.JOBS)


def test_the_readme_of_the_benchmarks_has_the_tables_of_the_saved_device() -> None:
    assert device.saved_tables() in device.README.read_text(), "run `benchmarks device --write`"


def test_a_job_that_fails_is_reported_and_the_next_jobs_run_in_a_new_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from msrl.trainer import launch

    class Ranks:
        """Runs out of memory above two rows and fails in the job `bad`."""

        def __init__(self, target: str, work: Work, **_: Any) -> None:
            assert target == device.TARGET
            self.jobs = work.jobs

        def __enter__(self) -> Ranks:
            return self

        def __exit__(self, *_: object) -> None: ...

        def messages(self) -> Iterator[Any]:
            yield Facts("a device", {})
            for job in self.jobs:
                if job.name == "bad":
                    raise launch.RankError(
                        "rank 0 failed:\nTraceback\nRuntimeError: no kernel image"
                    )
                if isinstance(job, Speed) and job.rows_at_once > 2:
                    problem = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
                    raise launch.RankError(f"rank 0 failed:\n{problem}")
                yield job

    monkeypatch.setattr(launch, "LocalRanks", Ranks)
    good, bad, speed = (
        Training("good", "dense", "float32"),
        Training("bad", "dense", "float32"),
        Speed("a", "dense", 4, 4, (8,), 1),
    )
    results = dict(device.results("cpu", tmp_path, (3,), [good, bad, speed, good]))
    assert (
        results["bad", "float32"] == "RuntimeError: no kernel image"
        and results["good", "float32"] == good
    )
    assert results["a", "bfloat16"].rows_at_once == 2 and results["facts"]["device"] == "a device"
    row = device.parity_row(bad, results["bad", "float32"], results["good", "float32"])
    failure = "failed: RuntimeError: no kernel image"
    assert (
        device.parity_line(row)
        == f"| bad | float32 | | {failure} | | | 0.0001 | | 0.0001 | | **no** |"
    )


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT", "matrix products"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)",
            "matrix products",
        ),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel<cutlass::bfloat16_t>(Params)",
            "attention",
        ),
        (
            "void at::native::multi_tensor_apply_kernel"
            "<at::native::FusedAdamMathFunctor<float, 4>>(long)",
            "AdamW",
        ),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::mul>(int)",
            "at::native::elementwise_kernel",
        ),
        ("aten::mm", "matrix products"),
        ("aten::mul", "aten::mul"),
    ],
)
def test_kernels_are_classified_by_their_work(kernel: str, kind: str) -> None:
    assert classify_kernel(kernel) == kind


def test_losses_and_the_first_gradient_have_goals_and_the_last_gradient_is_only_printed() -> None:
    job, cpu = Training("plain", "dense", "bfloat16"), Trained((4.0, 2.0), (1.0, 3.0), "torch")
    row = device.parity_row(job, Trained((4.0, 2.03), (1.01, 6.0), "fused"), cpu)
    assert row["reached"] and row["last_grad_norm_off"] == 1.0
    assert "| 1.5e-02 | 0.02 | 1.0e-02 | 0.02 | 1.0e+00 | yes |" in device.parity_line(row)
    for losses, norms in (
        ((4.0, 2.05), (1.0, 3.0)),
        ((4.0, 2.0), (1.03, 3.0)),
        ((4.0, float("nan")), (1.0, 3.0)),
    ):
        assert device.parity_line(
            device.parity_row(job, Trained(losses, norms, "fused"), cpu)
        ).endswith("| **no** |")


def test_nan_and_infinity_have_an_infinite_relative_difference() -> None:
    assert device.relative(float("nan"), 1.0) == device.relative(float("inf"), 1.0) == float("inf")
    assert device.relative(1.5, 1.0) == 0.5
