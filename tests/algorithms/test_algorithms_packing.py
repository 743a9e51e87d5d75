"""Packing: positions and images in a micro-batch, bins, balance, the loss under packings."""

import numpy as np
import pytest
import torch

from msrl.algorithms.aggregate import weighted_sum
from msrl.algorithms.image_positions import image_positions
from msrl.algorithms.losses.ppo import policy_loss
from msrl.algorithms.packing import (
    Sequences,
    balanced,
    bins,
    micro_batch,
    per_token,
    scatter_tokens,
    sft_sequences,
)
from msrl.algorithms.tokens import PolicyTokens
from msrl.errors import MsrlError
from msrl.trainer.objective.batches import num_loss_tokens, select
from msrl.types import Image, PlacedImage, RenderedExample
from support import mentions


def ints(*values):
    return np.array(values, dtype=np.int64)


def floats(*values):
    return np.array(values, dtype=np.float32)


def bools(*values):
    return np.array(values, dtype=np.bool_)


def test_two_sequences_are_concatenated_and_predict_only_their_own_tokens():
    batch = micro_batch(
        [ints(10, 11, 12), ints(20, 21)],
        [bools(False, True, True), bools(True, True)],
        {"advantages": [floats(0, 1, 2), floats(9, 3)]},
        pad_to_multiple=4,
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21, 21, 21, 21]
    assert batch.labels.tolist() == [11, 12, 0, 21, 0, 0, 0, 0]
    assert batch.loss_mask.tolist() == [True, True, False, True, False, False, False, False]
    assert batch.fields["advantages"].tolist() == [1, 2, 0, 3, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    dtypes = (
        batch.token_ids.dtype,
        batch.labels.dtype,
        batch.loss_mask.dtype,
        batch.cu_seqlens.dtype,
        batch.fields["advantages"].dtype,
    )
    assert dtypes == (np.int64, np.int64, np.bool_, np.int32, np.float32)


def test_no_padding_segment_where_none_is_needed():
    assert micro_batch(
        [ints(1, 2), ints(3, 4)], [bools(1, 1), bools(1, 1)], pad_to_multiple=2
    ).cu_seqlens.tolist() == [0, 2, 4]


def test_fields_of_masked_tokens_are_zero():
    batch = micro_batch(
        [ints(1, 2, 3)], [bools(False, False, True)], {"x": [floats(np.nan, np.nan, 5)]}
    )
    assert batch.fields["x"].tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    ("ids", "masks", "fields"),
    [
        ([], [], {}),
        ([ints()], [bools()], {}),
        ([ints(1, 2)], [bools(True)], {}),
        ([ints(1)], [bools(True)], {"x": [floats(1, 2)]}),
    ],
)
def test_inconsistent_sizes_are_refused(ids, masks, fields):
    with pytest.raises(ValueError, match=mentions("token")):
        micro_batch(ids, masks, fields)


def test_sft_examples_keep_their_mask():
    batch = micro_batch(*sft_sequences([RenderedExample(ints(5, 6, 7), bools(False, False, True))]))
    assert batch.labels[batch.loss_mask].tolist() == [7]


def test_exactly_the_responses_of_samples_are_trained_with_their_fields():
    masks = [np.arange(5) >= 2] * 2
    fields = {
        "advantages": scatter_tokens(floats(7, 8, 9, 7, 8, 9), masks),
        "sampler_logprobs": scatter_tokens(floats(-1, -2, -3, -1, -2, -3), masks),
    }
    batch = micro_batch([ints(1, 2, 3, 4, 5)] * 2, masks, fields)
    assert batch.labels[batch.loss_mask].tolist() == [3, 4, 5, 3, 4, 5]
    assert batch.fields["advantages"][batch.loss_mask].tolist() == [7, 8, 9, 7, 8, 9]
    assert batch.fields["sampler_logprobs"].tolist() == [0, -1, -2, -3, 0] * 2


def test_values_of_positions_become_values_of_tokens():
    numbers = [floats(0, 1, 2), floats(0, 3), floats(0)]
    ids, masks = (
        [np.arange(len(n)) for n in numbers],
        [np.ones(len(n), dtype=bool) for n in numbers],
    )
    batch = micro_batch(ids, masks, {"x": numbers}, pad_to_multiple=8)
    back = per_token(batch.fields["x"], batch.cu_seqlens)
    assert [b.tolist() for b in back[:3]] == [n.tolist() for n in numbers]


def test_bins_by_hand():
    assert bins([5, 9, 1, 4, 6, 5], 10) == ((0, 5), (1, 2), (3, 4))
    assert bins([], 10) == ()
    assert bins([3, 3, 3], 3) == ((0,), (1,), (2,))


def test_bins_hold_everything_once_within_capacity_and_near_the_optimum():
    lengths = np.random.default_rng(1).integers(1, 513, 400).tolist()
    packed = bins(lengths, 1024)
    assert sorted(i for items in packed for i in items) == list(range(400))
    assert all(
        sum(lengths[i] for i in items) <= 1024 and list(items) == sorted(items) for items in packed
    )
    assert len(packed) <= np.ceil(sum(lengths) / 1024) * 11 / 9 + 1
    assert packed == bins(lengths, 1024)


def test_bins_count_the_patches_of_different_images() -> None:
    small, large = Image("small", (1, 2, 2), b""), Image("large", (1, 4, 4), b"")
    shown = [{small}, {large}, {small}, set[Image]()]
    images = [frozenset(each) for each in shown]
    assert bins([4] * 4, 16, images, 16) == ((0, 2, 3), (1,))
    assert bins([4] * 4, 16, images, 20) == bins([4] * 4, 16, images) == ((0, 1, 2, 3),)
    with pytest.raises(MsrlError, match=mentions("max_patches_per_micro_batch=15", "16 patches")):
        bins([4] * 4, 16, images, 15)


def test_a_sequence_longer_than_the_capacity_is_refused():
    with pytest.raises(MsrlError, match=mentions("11", "10", "micro-batch")):
        bins([3, 11], 10)


def test_balanced_ranks_have_equal_counts_and_nearly_equal_lengths():
    assert balanced([8, 1, 7, 2], 2) == ((0, 1), (2, 3))
    lengths = np.random.default_rng(2).integers(1, 2000, 256).tolist()
    shares = balanced(lengths, 8)
    assert {len(p) for p in shares} == {32}
    assert sorted(i for p in shares for i in p) == list(range(256))
    loads = [sum(lengths[i] for i in p) for p in shares]
    assert max(loads) - min(loads) < 0.02 * np.mean(loads)


def test_a_count_that_does_not_divide_is_refused():
    with pytest.raises(MsrlError, match=mentions("5", "2", "sequences")):
        balanced([1] * 5, 2)


def random_samples(count=12):
    random = np.random.default_rng(3)
    shapes = [(int(p), int(r)) for p, r in random.integers(1, 9, (count, 2))]
    masks = tuple(np.arange(p + r) >= p for p, r in shapes)
    num_tokens = sum(r for _, r in shapes)
    fields = {
        "advantages": scatter_tokens(random.normal(size=num_tokens).astype(np.float32), masks),
        "sampler_logprobs": scatter_tokens(
            random.normal(-1, 0.3, num_tokens).astype(np.float32), masks
        ),
    }
    return Sequences(tuple(random.integers(0, 50, len(mask)) for mask in masks), masks, fields)


def packed_loss_and_gradient(samples, groups, pad_to_multiple, ratio):
    """Return the loss of a table of logits by (token, next token) under one packing.

    This is a model without context, but with a real gradient.
    """
    table = (torch.arange(2500, dtype=torch.float64).reshape(50, 50) * 0.37).sin().requires_grad_()
    num_tokens = num_loss_tokens(samples)
    total = 0.0
    for group in groups:
        batch = micro_batch(*select(samples, group), pad_to_multiple=pad_to_multiple)
        labels, mask = torch.from_numpy(batch.labels), torch.from_numpy(batch.loss_mask)
        logprobs = (
            table[torch.from_numpy(batch.token_ids)]
            .log_softmax(-1)
            .gather(1, labels[:, None])[:, 0]
        )
        fields = {name: torch.from_numpy(values) for name, values in batch.fields.items()}
        numbers = torch.from_numpy(
            np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
        )
        tokens = PolicyTokens.of(
            logprobs, fields["sampler_logprobs"], fields["advantages"], mask, numbers, ratio=ratio
        )
        values = policy_loss(tokens, clip_low=0.2, clip_high=0.2, dual=None).loss
        loss = weighted_sum(values, torch.full_like(values, 1 / num_tokens), mask)
        loss.backward()
        total += loss.item()
    return total, table.grad


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_packing_and_padding_do_not_change_the_loss_and_the_gradient(ratio):
    """The advantages differ by token."""
    samples = random_samples()
    lengths = [len(ids) for ids in samples.token_ids]
    expected, gradient = packed_loss_and_gradient(samples, [range(12)], 1, ratio)
    for groups in (
        bins(lengths, 20),
        bins(lengths, 33),
        balanced(lengths, 4),
        [[i] for i in range(12)],
    ):
        for pad_to_multiple in (1, 8):
            loss, other = packed_loss_and_gradient(samples, groups, pad_to_multiple, ratio)
            assert loss == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(other, gradient, rtol=1e-10, atol=1e-14)


WIDE, HIGH = Image("wide", (1, 2, 6), b""), Image("high", (1, 4, 2), b"")  # 1 x 3 and 2 x 1 tokens


def test_positions_by_hand() -> None:
    """Two tokens, an image of one row and three columns, one token, one of two rows, a token.

    Text after an image continues after its largest row or column. The next sequence has no image.
    """
    cu_seqlens = np.array([0, 9, 11], np.int32)
    images = (PlacedImage(2, WIDE), PlacedImage(6, HIGH))
    times, rows, columns = image_positions(cu_seqlens, images, 2).tolist()
    assert times == [0, 1, 2, 2, 2, 5, 6, 6, 8, 0, 1]
    assert rows == [0, 1, 2, 2, 2, 5, 6, 7, 8, 0, 1]
    assert columns == [0, 1, 2, 3, 4, 5, 6, 6, 8, 0, 1]


def test_a_picture_at_the_start_of_a_sequence_and_one_at_its_end() -> None:
    cu_seqlens = np.array([0, 3, 5, 8], np.int32)
    images = (PlacedImage(0, WIDE), PlacedImage(3, HIGH), PlacedImage(5, WIDE))
    times, rows, columns = image_positions(cu_seqlens, images, 2).tolist()
    assert times == [0] * 8
    assert rows == [0, 0, 0, 0, 1, 0, 0, 0]
    assert columns == [0, 1, 2, 0, 0, 0, 1, 2]


def test_text_has_equal_positions() -> None:
    positions = image_positions(np.array([0, 2, 5], np.int32), (), 2)
    assert positions.tolist() == [[0, 1, 0, 1, 2]] * 3


def test_pictures_follow_their_sequences_into_micro_batches() -> None:
    rows = tuple(np.arange(length) for length in (4, 5, 6))
    masks = tuple(np.ones(len(row), bool) for row in rows)
    images = ((PlacedImage(1, WIDE),), (), (PlacedImage(4, HIGH), PlacedImage(0, WIDE)))
    sequences = Sequences(rows, masks, {}, None, images)
    packed = micro_batch(*select(sequences, (2, 1, 0)), pad_to_multiple=16)
    assert [(placed.offset, placed.image.key) for placed in packed.images] == [
        (0, "wide"),
        (4, "high"),
        (12, "wide"),
    ]
    assert micro_batch(rows, masks).images == ()
