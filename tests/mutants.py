"""Measure what the tests notice: change the code in one place at a time and run the tests.

A mutant is killed if a test fails. First run the quick tests that reach the changed module through
few imports, then the slow ones that import it or an importer. Only if these pass, all tests without
`full` run. Use it before and after a change of the tests: the same mutants must be killed.

    python tests/mutants.py [--results FILE] [--workers N] [--near] [NAME...]
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

from support import ROOT, folders

TIMEOUT_S = 3600
LARGEST_DISTANCE = 2  # imports between a quick test and the changed module
PLUGIN_PACKAGES = {
    f"msrl.algorithms.{kind}" for kind in ("advantages", "divergences", "losses", "preference")
}
_IGNORED = shutil.ignore_patterns("__pycache__", ".*")


@dataclass(frozen=True)
class Mutant:
    """A mistake: in one file of src/msrl, this text, which it contains once, becomes another."""

    name: str
    file: str
    text: str
    mistake: str

    @property
    def module(self) -> str:
        return "msrl." + self.file.removesuffix(".py").replace("/", ".")

    def mistaken(self, code: str) -> str:
        """Return the code with the mistake. Raises ValueError unless it has the text once."""
        if code.count(self.text) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.text!r} not exactly once")
        return code.replace(self.text, self.mistake)


MUTANTS = (
    Mutant(
        "k3-sign",
        "algorithms/kl.py",
        "((-bounded).exp() - 1.0 + bounded)",
        "(bounded.exp() - 1.0 - bounded)",
    ),
    Mutant(
        "gae-across-responses",
        "algorithms/advantages/gae.py",
        "following[last[lengths > 0]] = 0.0",
        "pass",
    ),
    Mutant("rloo-size", "algorithms/advantages/rloo.py", "(sizes - 1)", "(sizes + 1)"),
    Mutant(
        "biased-deviation",
        "algorithms/advantages/_groups.py",
        "count - correction, 1.0",
        "count, 1.0",
    ),
    Mutant(
        "biased-whitening",
        "algorithms/token_rewards.py",
        "counted.std(ddof=correction)",
        "counted.std()",
    ),
    Mutant(
        "no-discount",
        "algorithms/token_rewards.py",
        "+= gamma * following[:count]",
        "+= following[:count]",
    ),
    Mutant(
        "difficulty-includes-bounds",
        "algorithms/selection.py",
        "(measure > lower) & (measure < upper)",
        "(measure >= lower) & (measure <= upper)",
    ),
    Mutant("keeps-truncated", "algorithms/selection.py", "keep = ~truncated", "keep = truncated"),
    Mutant(
        "masked-sequences-count",
        "algorithms/aggregate.py",
        "1.0 / (num_sequences * np",
        "1.0 / (len(counts) * np",
    ),
    Mutant(
        "largest-surrogate",
        "algorithms/losses/ppo.py",
        "torch.minimum(plain, clipped)",
        "torch.maximum(plain, clipped)",
    ),
    Mutant(
        "dual-clip-of-one",
        "algorithms/losses/ppo.py",
        "floor = dual * advantages",
        "floor = advantages",
    ),
    Mutant(
        "sum-for-mean-of-sequence",
        "algorithms/tokens.py",
        "return sequence_means(token_log_ratio.detach()",
        "return sequence_sums(token_log_ratio.detach()",
    ),
    Mutant(
        "weights-not-truncated",
        "algorithms/mismatch.py",
        "ratio.clamp(max=self.upper) * mask",
        "ratio * mask",
    ),
    Mutant(
        "mask-of-good-answers",
        "algorithms/mismatch.py",
        "(advantages < 0) & (distance",
        "(advantages > 0) & (distance",
    ),
    Mutant(
        "smaller-value-loss",
        "algorithms/value.py",
        "torch.maximum(squared, clipped)",
        "torch.minimum(squared, clipped)",
    ),
    Mutant(
        "margin-sign",
        "algorithms/preference/dpo.py",
        "chosen - rejected - pairs.margins",
        "chosen - rejected + pairs.margins",
    ),
    Mutant(
        "kto-sides",
        "algorithms/preference/kto.py",
        "labeled.is_desirable, desirable, undesirable",
        "labeled.is_desirable, undesirable, desirable",
    ),
    Mutant("ipo-goal", "algorithms/preference/ipo.py", "1 / (2 * beta)", "1 / beta"),
    Mutant(
        "kl-controller-inverse",
        "algorithms/kl_controller.py",
        "divergence / target - 1.0",
        "target / divergence - 1.0",
    ),
    Mutant(
        "labels-not-shifted", "algorithms/packing.py", "(array[1:], zero)", "(array[:-1], zero)"
    ),
    Mutant("values-off-by-one", "algorithms/packing.py", "piece[:-1])) for", "piece[1:])) for"),
    Mutant(
        "blend-by-inverse-weight",
        "data/order.py",
        "((number + 0.5) / self.weights[d], d",
        "((number + 0.5) * self.weights[d], d",
    ),
    Mutant("masked-answers-trained", "data/spans.py", "is_trained and not is_masked", "is_trained"),
    Mutant("row-never-full", "data/pack.py", "(free - lengths[index], row)", "(free, row)"),
    Mutant(
        "warmup-off-by-one",
        "trainer/schedule.py",
        "(not self.from_zero)",
        "self.from_zero",
    ),
    Mutant(
        "decay-below-minimum",
        "trainer/schedule.py",
        "self.min_lr + (self.lr - self.min_lr) * share",
        "self.lr * share",
    ),
    Mutant(
        "local-denominator",
        "trainer/objective/losses.py",
        "-outputs.logprobs.sum() / num_tokens",
        "-outputs.logprobs.mean()",
    ),
    Mutant(
        "entropy-sign",
        "trainer/objective/losses.py",
        "(-self.entropy_coef, outputs.entropy)",
        "(self.entropy_coef, outputs.entropy)",
    ),
    Mutant(
        "correction-ignored", "trainer/objective/losses.py", "policy.loss * factors", "policy.loss"
    ),
    Mutant(
        "labels-of-other-ranks",
        "trainer/objective/logprobs.py",
        "(at_label - highest).masked_fill_(~is_here, 0.0)",
        "at_label - highest",
    ),
    Mutant(
        "entropy-of-shards",
        "trainer/objective/logprobs.py",
        "(weighted + total * below) * scale",
        "weighted * scale",
    ),
    Mutant(
        "mean-for-sum-of-prefixes", "trainer/model/prefixes.py", "values.sum(1)", "values.mean(1)"
    ),
    Mutant(
        "gradient-order",
        "trainer/model/context.py",
        "grads[0][context.inverse]",
        "grads[0][context.order]",
    ),
    Mutant(
        "llama3-frequencies",
        "trainer/model/rope.py",
        "wavelengths > context / scaling.low_freq_factor",
        "wavelengths > context / scaling.high_freq_factor",
    ),
    Mutant("pairs-not-swapped", "trainer/model/rope.py", ".flip(-1)", ""),
    Mutant(
        "experts-not-scaled",
        "trainer/model/experts.py",
        "weights * moe.scaling_factor, experts",
        "weights, experts",
    ),
    Mutant("bias-in-weights", "trainer/model/experts.py", "scores.gather(-1", "merit.gather(-1"),
    Mutant(
        "first-part-of-gate",
        "checkpoint/tensor_layouts.py",
        "_equal_part(half, 0, tp_rank, tp_size)",
        "_equal_part(half, 0, 0, tp_size)",
    ),
    Mutant(
        "state-not-reduced",
        "trainer/optimizer_state.py",
        "if group.size() > 1:",
        "if group.size() > 2:",
    ),
    Mutant(
        "updates-forgotten",
        "trainer/optimizer_state.py",
        "torch.tensor(float(updates)",
        "torch.tensor(float(updates - 1)",
    ),
    Mutant(
        "staleness-off-by-one",
        "rollout/runtime/buffer.py",
        "slot.version < version - self._staleness",
        "slot.version <= version - self._staleness",
    ),
    Mutant("weights-verified-once", "workflows/rl/weight_transfer.py", '== "every"', '!= "every"'),
    Mutant("samples-impossible-tokens", "rollout/inverse_cdf.py", "right=True", "right=False"),
    Mutant(
        "same-order-every-epoch",
        "workflows/rl/update/batches.py",
        "[config.run.seed, step, epoch]",
        "[config.run.seed, step]",
    ),
    Mutant(
        "exact-tolerance",
        "rewards/math/equality.py",
        "_same_number(*values, tolerance, percent)",
        "_same_number(*values, 0.0, percent)",
    ),
    Mutant(
        "rows-shared-by-token-ids",
        "trainer/objective/device_batch.py",
        "batch.token_ids if images is None else images.identities(batch.token_ids)",
        "batch.token_ids",
    ),
    Mutant(
        "images-with-1d-positions",
        "trainer/objective/device_batch.py",
        "None if images is None else images.positions",
        "None",
    ),
    Mutant(
        "swapped-grid",
        "algorithms/image_positions.py",
        "np.indices((1, rows, columns))",
        "np.indices((1, columns, rows))",
    ),
    Mutant(
        "tower-gradients-not-summed",
        "trainer/model/gpt.py",
        "sequence_parallel=config.sequence_parallel",
        "sequence_parallel=False",
    ),
    Mutant(
        "exif-orientation-ignored",
        "vision/pixels.py",
        "_ORIENTATION = 0x0112",
        "_ORIENTATION = 0xC0DE",
    ),
)


@dataclass(frozen=True)
class Result:
    """The first test that failed with a mutant, or none, and the time of its tests."""

    mutant: Mutant
    killed_by: str
    seconds: float

    def row(self) -> tuple[str, str, str]:
        return self.mutant.name, self.killed_by or "survived", f"{self.seconds:.0f}"


def source(mutant: Mutant) -> str:
    """Return the code of the file that a mutant changes."""
    return (ROOT / "src" / "msrl" / mutant.file).read_text()


def distances(graph: grimp.ImportGraph, module: str) -> dict[str, int]:
    """Return the number of imports from each module of msrl to `module`, 0 for itself."""
    found, frontier = {module: 0}, {module}
    for distance in range(1, LARGEST_DISTANCE + 1):
        importers = set[str]().union(*map(graph.find_modules_that_directly_import, frontier))
        frontier = importers - found.keys()
        found |= dict.fromkeys(frontier, distance)
    return found


@functools.cache
def own_imports(path: Path) -> frozenset[str]:
    """Return the names that a file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)


@functools.cache
def files_by_module() -> dict[str, Path]:
    """Return the tests and helpers by the names under which they are imported."""
    return {path.stem: path for folder in folders() for path in Path(folder).glob("*.py")}


def list_imports(path: Path) -> set[str]:
    """Return what a test file and the helpers that it imports import."""
    names, pending, seen = set[str](), {path}, set[Path]()
    while pending:
        file = pending.pop()
        seen.add(file)
        names |= own_imports(file)
        started = re.findall(r'"(\w+):main"', file.read_text())  # code of ranks
        modules = [*(name.split(".")[0] for name in own_imports(file)), *started]
        helpers = {files_by_module()[module] for module in modules if module in files_by_module()}
        pending |= helpers - seen
    return names


def near_files(mutant: Mutant, graph: grimp.ImportGraph) -> list[tuple[int, str]]:
    """Return (distance, test file), nearest first.

    A plugin is loaded by its name, so files that contain its name are near.
    """
    away = distances(graph, mutant.module)
    plugins = (name for name in away if name.rpartition(".")[0] in PLUGIN_PACKAGES)
    names = re.compile("|".join(rf"\b{name.rpartition('.')[2]}\b" for name in plugins) or r"\Z.")
    ranked: list[tuple[int, str]] = []
    for path in (path for name, path in files_by_module().items() if name.startswith("test_")):
        reached = [away[name] for name in list_imports(path) if name in away]
        if names.search(path.read_text()):
            reached.append(1)
        if reached:
            ranked.append((min(reached), str(path.relative_to(ROOT))))
    return sorted(ranked)


def stages(mutant: Mutant, graph: grimp.ImportGraph, *, near: bool) -> Iterator[list[str]]:
    """Yield the pytest arguments of each stage, nearest test files first."""
    ranked = near_files(mutant, graph)
    if ranked:
        yield ["-m", "not slow and not full", *(name for _, name in ranked)]
    direct = [name for distance, name in ranked if distance < LARGEST_DISTANCE]
    if direct:
        yield ["-m", "slow and not full", *direct]
    if not near:
        yield ["-m", "not full", "tests"]


def run(mutant: Mutant, graph: grimp.ImportGraph, *, workers: int, near: bool) -> Result:
    """Run the tests of a mutant until one fails."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "src"
        shutil.copytree(ROOT / "src", package, ignore=_IGNORED)
        (Path(folder) / "templates").symlink_to(ROOT / "templates")
        (package / "msrl" / mutant.file).write_text(mutant.mistaken(source(mutant)))
        for arguments in stages(mutant, graph, near=near):
            if failed := first_failure(arguments, package, workers):
                return Result(mutant, failed, time.monotonic() - begin)
    return Result(mutant, "", time.monotonic() - begin)


def first_failure(arguments: Iterable[str], package: Path, workers: int) -> str:
    """Return the first failing test with the code in `package`, or nothing."""
    options = ("-x", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile")
    env = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = (sys.executable, "-m", "pytest", *options, *arguments)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--results", type=Path, help="append name, test and seconds to this file")
    parser.add_argument("--workers", type=int, default=0, help="pytest's workers (default: none)")
    parser.add_argument("--near", action="store_true", help="do not run all tests of survivors")
    options = parser.parse_args()
    graph = grimp.build_graph("msrl")
    selected = [each for each in MUTANTS if not options.names or each.name in options.names]
    survivors = 0
    for mutant in selected:
        result = run(mutant, graph, workers=options.workers, near=options.near)
        survivors += not result.killed_by
        print(*result.row(), sep="  ", flush=True)
        if options.results:
            with options.results.open("a", newline="") as file:
                csv.writer(file).writerow(result.row())
    print(f"{len(selected) - survivors} of {len(selected)} mutants killed")


if __name__ == "__main__":
    main()
