"""Core attention and rotary embedding agree with plain formulas and transformers' frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import LLAMA, LLAMA3_SCALING, shape
from msrl.trainer.model import attention
from msrl.trainer.model.attention import block_diagonal_attention
from msrl.trainer.model.packed import Rotation
from msrl.trainer.model.padding import pad_tokens
from msrl.trainer.model.rope import RotaryTables, rope_frequencies, rotate

LENGTHS = (7, 3, 12, 12)
N, H, G, D = sum(LENGTHS), 4, 2, 8


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(N, heads, D, dtype=torch.float64, requires_grad=True) for heads in (H, G, G)
    ]


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with one masked softmax over all tokens of the micro-batch."""
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    distance = position[:, None] - position[None]
    visible = (sample[:, None] == sample[None]) & (distance >= 0) & (distance < (window or N))
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("hnm,mhd->nhd", weights / total, v)


@pytest.mark.sample(5)
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("block", [5, 512])
def test_attention_and_its_gradient_agree_with_one_masked_softmax(
    window: int | None, softcap: float | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK", block)
    inputs = _inputs()
    actual = block_diagonal_attention(*inputs, LENGTHS, 0.3, window, softcap)
    expected = _plain(*inputs, 0.3, window, softcap)
    tolerance = 1e-10 if softcap is None else 1e-6  # capped scores are float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    weight = torch.randn(N, H, D, dtype=torch.float64)
    gradients, expected_gradients = (
        torch.autograd.grad((output * weight).sum(), inputs) for output in (actual, expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_are_part_of_every_softmax(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 5)
    inputs, sinks = (
        _inputs(),
        torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True),
    )
    actual = block_diagonal_attention(*inputs, LENGTHS, 0.3, window, sinks=sinks)
    expected = _plain(*inputs, 0.3, window, None, sinks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    weight = torch.randn(N, H, D, dtype=torch.float64)
    gradients, expected_gradients = (
        torch.autograd.grad((output * weight).sum(), (*inputs, sinks))
        for output in (actual, expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5), (4, 1.5)])
def test_nan_in_another_sample_has_no_effect(window: int | None, softcap: float | None) -> None:
    """Windows end at the start of a sample, so tokens of the sample before it are not visible."""
    inputs = _inputs()
    clean = block_diagonal_attention(*inputs, LENGTHS, None, window, softcap)
    with torch.no_grad():
        poisoned = [x.clone() for x in inputs]
        for x in poisoned:
            x[7:10] = float("nan")
    actual = block_diagonal_attention(*poisoned, LENGTHS, None, window, softcap)
    assert (
        torch.equal(actual[:7], clean[:7])
        and torch.equal(actual[10:], clean[10:])
        and actual[7:10].isnan().all()
    )


def test_a_window_includes_the_token_itself_and_those_just_before_it() -> None:
    q = torch.zeros(12, 1, 2)
    values = torch.arange(12.0)[:, None, None].expand(12, 1, 2)
    actual = block_diagonal_attention(q, q, values, (12,), window=3)[:, 0, 0]
    expected = [0.0, 0.5, *[float(i - 1) for i in range(2, 12)]]  # means of visible positions
    torch.testing.assert_close(actual, torch.tensor(expected))


SCALINGS = {
    "default": None,
    "llama3": LLAMA3_SCALING,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, every number": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_bitwise_equal_to_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: dict[str, Any] = {
        **LLAMA,
        "head_dim": 64,
        "rope_theta": 5e5,
        "rope_scaling": SCALINGS[name],
        "max_position_embeddings": 128,
    }
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(**{**config, "rope_scaling": SCALINGS[name] and dict(SCALINGS[name])})
    )
    for length in (128, 300):
        cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
        model = shape(config)
        assert torch.equal(rope_frequencies(model.rotary, length), embedding.inv_freq)
        packed = RotaryTables(model, torch.float32, torch.device("cpu"))((length,))
        rotation = packed.rotations[model.rotary]
        torch.testing.assert_close(rotation.cos[:, 0, 0], cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(rotation.sin[:, 0, 0, 32:], sin[0, :, 32:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [4, 8])
def test_pairs_rotate_by_their_angle_and_other_channels_are_unchanged(
    interleaved: bool, channels: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, channels // 2, dtype=torch.float64)
    pairs = [
        (2 * i, 2 * i + 1) if interleaved else (i, i + channels // 2) for i in range(channels // 2)
    ]
    cos, sin = (torch.zeros(5, 1, 1, channels, dtype=torch.float64) for _ in range(2))
    expected = x.detach().clone()
    for i, (a, b) in enumerate(pairs):
        turn = torch.polar(torch.ones(5, dtype=torch.float64), angles[:, i])[:, None]
        rotated = torch.complex(x.detach()[:, 0, :, a], x.detach()[:, 0, :, b]) * turn
        expected[:, 0, :, a], expected[:, 0, :, b] = rotated.real, rotated.imag
        cos[:, 0, 0, a] = cos[:, 0, 0, b] = angles[:, i].cos()
        sin[:, 0, 0, a], sin[:, 0, 0, b] = -angles[:, i].sin(), angles[:, i].sin()
    rotation = Rotation(cos, sin, interleaved)
    torch.testing.assert_close(rotate(x, rotation), expected)
    assert torch.autograd.gradcheck(lambda y: rotate(y, rotation), (x,))


@pytest.mark.parametrize("window", [None, 4])
def test_values_narrower_than_keys_give_the_same_attention(window: int | None) -> None:
    query, key, value = _inputs()
    actual = block_diagonal_attention(query, key, value[..., :5], LENGTHS, 0.3, window)
    torch.testing.assert_close(
        actual, _plain(query, key, value[..., :5], 0.3, window, None), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5), (4, 1.5)])
def test_cpu_attention_in_bfloat16_is_computed_in_float32(
    window: int | None, softcap: float | None
) -> None:
    inputs = _inputs()
    bfloat16_inputs = [x.detach().bfloat16().requires_grad_() for x in inputs]
    weight = torch.randn(N, H, D, dtype=torch.float64)
    actual = block_diagonal_attention(*bfloat16_inputs, LENGTHS, None, window, softcap)
    expected = _plain(*inputs, D**-0.5, window, softcap)
    assert actual.dtype == torch.bfloat16
    exact = block_diagonal_attention(
        *(x.detach().bfloat16().float() for x in inputs), LENGTHS, None, window, softcap
    )
    assert torch.equal(actual, exact.bfloat16())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=3e-2)
    gradients = torch.autograd.grad((actual * weight).sum(), bfloat16_inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, exact_gradient in zip(gradients, expected_gradients, strict=True):
        difference = torch.linalg.norm(gradient.double() - exact_gradient)
        assert difference < 2e-2 * torch.linalg.norm(exact_gradient)


def test_token_counts_are_padded_where_kernels_are_compiled_per_shape() -> None:
    rows = torch.ones(70, 3, dtype=torch.bfloat16)
    padded = pad_tokens(rows)
    assert padded.shape == (128, 3) and torch.equal(padded[:70], rows) and not padded[70:].any()
    assert pad_tokens(padded) is padded
    float32_rows = torch.ones(70, 3)
    assert pad_tokens(float32_rows) is float32_rows
