"""Norms of gradients on the CPU against float64."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow  # imports Megatron


def test_the_norm_of_a_large_gradient_has_no_rounding_error_of_long_sums() -> None:
    from msrl.trainer.gradient_norm import accurate_norm

    gradient = torch.randn(16 << 20, generator=torch.Generator().manual_seed(0))
    expected = gradient.double().norm()
    assert abs(gradient.norm() / expected - 1) > 1e-4  # the reason for `accurate_norm`
    assert accurate_norm(gradient) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (4096,), (4097,), (2, 4096)])
def test_norms_of_all_sizes_equal_those_of_torch(shape: tuple[int, ...]) -> None:
    from msrl.trainer.gradient_norm import accurate_norm

    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert accurate_norm(gradient) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_megatron_takes_the_norm_of_all_gradients_from_it() -> None:
    from megatron.core.optimizer import clip_grads

    from msrl.trainer.gradient_norm import use_accurate_norms

    use_accurate_norms()
    use_accurate_norms()  # a second replica
    norm, _ = clip_grads.l2_norm_impl(
        65536, torch.zeros(1), [[torch.tensor([3.0]), torch.tensor([[0.0], [4.0]])]], False
    )
    assert norm.shape == (1,) and norm.item() == 5.0
