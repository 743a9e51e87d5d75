"""Products of vLLM's layers on CPU, whose numbers of rows are padded to a few sizes."""

from __future__ import annotations

import pytest
import torch

from msrl.rollout.vllm_products import ProductChanges, padded_rows


def test_decoding_steps_have_few_numbers_of_rows_and_little_padding() -> None:
    padded = [padded_rows(rows) for rows in range(1, 257)]
    assert len(set(padded)) == 17  # of 256
    assert all(0 <= after - before < 16 for before, after in enumerate(padded, 1))
    assert padded_rows(1) == 1  # a chat has no padding
    assert (padded_rows(0), padded_rows(257), padded_rows(320)) == (0, 320, 320)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padded_products_equal_those_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops as operators
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    rows: list[int] = []
    product = operators.onednn_mm

    def counted(handler: object, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(x.shape[:-1].numel())
        return product(handler, x, bias)

    monkeypatch.setattr(operators, "onednn_mm", counted)
    for _ in range(2):  # every engine of a process asks for it
        ProductChanges().pad_products()
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype)
    try:
        handler = operators.create_onednn_mm(weight.t(), 32)
    except RuntimeError as error:  # without AVX-512, vLLM's layers use torch's products
        pytest.skip(f"oneDNN has no product of {dtype} on this processor: {error}")
    for shape, expected in (((1, 32), 1), ((5, 32), 16), ((3, 7, 32), 32), ((16, 32), 16)):
        x = torch.randn(shape).to(dtype)
        y = operators.onednn_mm(handler, x, bias)
        exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), exact, rtol=1e-2, atol=1e-1)
        assert rows.pop() == (expected if dtype == torch.bfloat16 else x.shape[:-1].numel())
        assert not rows
