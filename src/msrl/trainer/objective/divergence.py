"""Distribution of the reference model for an exact KL divergence, stored as its last hidden states.

Hidden states are small: a vocabulary is tens of times wider. Letters: m selected positions of this
rank, R rows at a time, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

import functools

import torch

from msrl.trainer.model.outputs import HiddenStates
from msrl.trainer.objective.chunked import compute_logits
from msrl.trainer.objective.logprobs import Distribution, VocabColumns


def reference_distribution(output: HiddenStates, columns: VocabColumns) -> Distribution:
    """Return the distribution at m positions.

    It has their hidden states on the host and their normalizers; logits are computed R rows at a
    time.
    """
    project = functools.partial(
        compute_logits, weight=output.output_weight.detach(), softcap=output.softcap
    )
    hidden = output.values.detach()
    normalizers = [columns.normalizer(project(rows)) for rows in hidden.split(columns.rows_at_once)]
    return Distribution(hidden.cpu(), project, torch.cat(normalizers))
