"""Calls of the platforms' fused attention, with reference implementations in place of the kernels.

The reference implementations follow the kernels' documentation. The kernels are not tested, since
they need a device.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from msrl.platforms import cuda, get
from msrl.platforms.cuda import flash_attention
from msrl.platforms.npu import fusion_attention
from msrl.trainer.model import fused_attention as fused
from msrl.trainer.model.attention import block_diagonal_attention, packed_attention
from msrl.trainer.model.context import padded_lengths, rank_positions
from msrl.trainer.model.packed import PackedSequences
from support import assert_mentions

LENGTHS = (8, 4, 16, 16)
HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.3


def inputs(value_dim: int = DIM) -> list[Tensor]:
    torch.manual_seed(3)
    sizes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, value_dim))
    return [torch.randn(sum(LENGTHS), heads, dim, dtype=torch.float64) for heads, dim in sizes]


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Implement `VarlenAttention` with one masked softmax per sequence."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "fused kernels have one width"
    outputs = []
    for q_end, k_end, q_start, k_start in zip(
        query_ends, key_ends, (0, *query_ends), (0, *key_ends), strict=False
    ):
        q, k, v = query[q_start:q_end], key[k_start:k_end], value[k_start:k_end]
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (k, v))
        at = torch.arange(len(k) - len(q), len(k))[:, None]  # the queries are the last positions
        distance = at - torch.arange(len(k))
        visible = (distance >= 0) & (distance < (window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("value_dim", [DIM, 5])
def test_one_call_for_all_sequences_agrees_with_attention_per_length(
    window: int | None, value_dim: int
):
    query, key, value = inputs(value_dim)
    actual = fused.fused_attention(plain_kernel, query, key, value, LENGTHS, SCALE, window)
    torch.testing.assert_close(
        actual, block_diagonal_attention(query, key, value, LENGTHS, SCALE, window)
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_context_parallel_shares_agree_with_the_full_attention(window: int | None, num_ranks: int):
    query, key, value = inputs()
    lengths = (8, 24, 8, 4)
    padded = padded_lengths(lengths, num_ranks, 1)
    query, key, value = (torch.cat((x, x))[: sum(padded)] for x in (query, key, value))
    expected = block_diagonal_attention(query, key, value, padded, SCALE, window)
    for rank in range(num_ranks):
        local = torch.from_numpy(rank_positions(padded, rank, num_ranks))
        actual = fused.fused_context_attention(
            plain_kernel, query[local], key, value, padded, rank, num_ranks, SCALE, window
        )
        torch.testing.assert_close(actual, expected[local])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_torchs_flash_attention_is_called_with_the_right_arguments(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    from torch.nn.attention import varlen

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
        max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        """Window (W, 0): causal with W keys before the query; (-1, 0): causal without a window."""
        assert (
            enable_gqa == (query.shape[1] != key.shape[1])
            and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        )
        assert (max_q, max_k) == (
            int(cu_seq_q.diff().max()),
            int(cu_seq_k.diff().max()),
        ) and window_size[1] == 0
        before = None if window_size[0] == -1 else window_size[0] + 1
        return plain_kernel(
            query, key, value, cu_seq_q[1:].tolist(), cu_seq_k[1:].tolist(), scale, before
        )

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    query, key, value = inputs()
    ends = tuple(itertools.accumulate(LENGTHS))
    actual = flash_attention(query, key, value, ends, ends, SCALE, window)
    torch.testing.assert_close(
        actual, block_diagonal_attention(query, key, value, LENGTHS, SCALE, window)
    )
    last = torch.tensor([end - 1 for end in ends])
    torch.testing.assert_close(
        flash_attention(query[last], key, value, (1, 2, 3, 4), ends, SCALE, window), actual[last]
    )


def test_flash_attention_without_grouped_query_support_gets_repeated_heads(
    monkeypatch: pytest.MonkeyPatch,
):
    from torch.nn.attention import varlen

    bounds: list[Tensor] = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
        max_k: int, *,
        scale: float, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1]
        bounds.extend((cu_seq_q, cu_seq_k))
        return plain_kernel(
            query, key, value, cu_seq_q[1:].tolist(), cu_seq_k[1:].tolist(), scale, None
        )

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    query, key, value = inputs()
    ends = tuple(itertools.accumulate(LENGTHS))
    for _ in range(2):
        actual = flash_attention(query, key, value, ends, ends, SCALE, None)
        torch.testing.assert_close(
            actual, block_diagonal_attention(query, key, value, LENGTHS, SCALE)
        )
    assert all(each is bounds[0] for each in bounds), (
        "the bounds are copied to the device once, not once per layer"
    )


def test_flash_attention_without_window_support_is_not_used(monkeypatch: pytest.MonkeyPatch):
    from torch.nn.attention import varlen

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
    ) -> Tensor: ...

    cuda._has_varlen_attention.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert get("cuda").varlen_attention(torch.bfloat16, 128) is flash_attention
    cuda._has_varlen_attention.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert_mentions(
        get("cuda").varlen_attention(torch.bfloat16, 128),
        f"torch {torch.__version__}",
        "varlen_attn",
        "windows",
    )
    cuda._has_varlen_attention.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_npus_fusion_attention_is_called_with_the_right_arguments(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    def npu_fusion_attention(
        query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *,
        atten_mask: Tensor, scale: float,
        actual_seq_qlen: list[int], actual_seq_kvlen: list[int], sparse_mode: int,
        pre_tockens: int = 2147483647,
        next_tockens: int = 2147483647,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Mode 3: causal, aligned at the end. Mode 4: band of pre_tockens and next_tockens."""
        assert input_layout == "TND" and head_num == query.shape[1]
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)), (
            "the compressed mask of both modes"
        )
        assert sparse_mode == 3 or (sparse_mode == 4 and next_tockens == 0)
        window_size = None if sparse_mode == 3 else pre_tockens + 1
        return (
            plain_kernel(query, key, value, actual_seq_qlen, actual_seq_kvlen, scale, window_size),
        )

    module = types.ModuleType("torch_npu")
    vars(module)["npu_fusion_attention"] = npu_fusion_attention
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    query, key, value = inputs()
    ends = tuple(itertools.accumulate(LENGTHS))
    actual = fusion_attention(query, key, value, ends, ends, SCALE, window)
    torch.testing.assert_close(
        actual, block_diagonal_attention(query, key, value, LENGTHS, SCALE, window)
    )


def test_a_platform_without_a_kernel_logs_the_reason_and_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert get("npu").varlen_attention(torch.bfloat16, 128) is fusion_attention
    assert_mentions(
        get("npu").varlen_attention(torch.bfloat16, 40), "npu_fusion_attention", 512, 40
    )
    assert_mentions(get("cuda").varlen_attention(torch.float32, 128), "flash attention", "float32")
    assert_mentions(get("cuda").varlen_attention(torch.bfloat16, 264), "flash attention", 256, 264)
    fused.select_kernel.cache_clear()
    query, key, value = inputs()
    expected = block_diagonal_attention(query, key, value, LENGTHS, SCALE)
    packed = PackedSequences(LENGTHS, {})
    torch.testing.assert_close(packed_attention(query, key, value, packed, SCALE), expected)
    assert not caplog.text, "the CPU has no fused kernel, so nothing is logged"
    fused.select_kernel.cache_clear()
    monkeypatch.setattr(type(get("cpu")), "varlen_attention", lambda *_: "no such heads")
    for _ in range(2):
        torch.testing.assert_close(packed_attention(query, key, value, packed, SCALE), expected)
    assert_mentions(caplog.text, "no such heads")
    assert caplog.text.count("scaled_dot_product_attention") == 1
    fused.select_kernel.cache_clear()
    monkeypatch.setattr(type(get("cpu")), "varlen_attention", lambda *_: plain_kernel)
    torch.testing.assert_close(packed_attention(query, key, value, packed, SCALE), expected)
    fused.select_kernel.cache_clear()
