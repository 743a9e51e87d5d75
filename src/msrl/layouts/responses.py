"""LogNormalLengths of responses for a plan: from a file, of a previous run, or an assumption."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from msrl.errors import MsrlError
from msrl.layouts.rollouts import ListedLengths
from msrl.layouts.simulation import LogNormalLengths
from msrl.tracking.metrics import read_metrics

_DRAWS = 4096
_SIGMA = 0.8  # of the logarithm, where the spread is assumed
_MEAN_SHARE = 1 / 3  # of the limit, where the mean is assumed, too
_STEPS = 20  # of a previous run, its last ones
_MEAN, _LONGEST = "rollout/response_length", "rollout/response_length_max"


def read_responses(text: str | None, limit: int, samples_per_step: int) -> ListedLengths:
    """Return the lengths that `--responses` names; without it, those of an assumption.

    It is a number of tokens, a file with one number per line, or the folder of a run. `limit` is
    the largest length. The runs that a plan compares draw equal lengths.

    Raises:
        MsrlError: The file or folder has no lengths.
    """
    if text is None:
        name = f"assumed: mean {_MEAN_SHARE:.0%} of rollout.max_response_tokens, log-normal"
        return _log_normal(name, limit * _MEAN_SHARE, _SIGMA, limit)
    if text.isascii() and text.isdigit() and int(text):
        name = f"of --responses, with an assumed spread ({_SIGMA:g} of the logarithm)"
        return _log_normal(name, int(text), _SIGMA, limit)
    path = Path(text)
    if path.is_dir():
        return _of_run(path, limit, samples_per_step)
    if not path.is_file():
        raise MsrlError(
            f"--responses={text}: neither a number of tokens nor a file nor the folder of a run"
        )
    return ListedLengths(f"of {text}", [min(length, limit) for length in _read_file(path)])


def _read_file(path: Path) -> list[int]:
    lengths = list[int]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and int(word)):
            raise MsrlError(
                f"--responses: {path}:{number}: must be the length of a response in tokens"
            )
        lengths.append(int(word))
    if not lengths:
        raise MsrlError(f"--responses={path}: has no lengths. Write one number per line.")
    return lengths


def _of_run(folder: Path, limit: int, samples_per_step: int) -> ListedLengths:
    """Return log-normal lengths with the mean and the longest response of a run's last steps.

    The longest of n lengths is about the quantile 1 - 1 / (n + 1).
    """
    reports = [report.metrics for report in read_metrics(folder) if _MEAN in report.metrics]
    if not reports:
        raise MsrlError(f"--responses={folder}: not a run with rollouts; it has no {_MEAN}")
    mean = statistics.fmean(metrics[_MEAN] for metrics in reports[-_STEPS:])
    longest = statistics.fmean(metrics[_LONGEST] for metrics in reports[-_STEPS:])
    z = statistics.NormalDist().inv_cdf(1 - 1 / (max(samples_per_step, 2) + 1))
    # log(longest / mean) = sigma z - sigma^2 / 2
    ratio = math.log(max(longest / mean, 1.0))
    sigma = z - math.sqrt(max(z * z - 2 * ratio, 0.0))
    return _log_normal(f"of the last steps of {folder}", mean, sigma, limit)


def _log_normal(name: str, mean: float, sigma: float, limit: int) -> ListedLengths:
    median = mean / math.exp(sigma**2 / 2)
    return ListedLengths(name, LogNormalLengths(name, median, sigma, limit, "").draw(0, _DRAWS))
