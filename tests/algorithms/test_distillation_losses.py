"""Divergences of distillation against formulas, automatic differentiation and TRL.

R positions, V tokens of the vocabulary, K teachers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import golden
from msrl import registry
from msrl.trainer.objective.chunked import chunked_logprobs
from msrl.trainer.objective.logprobs import (
    Distribution,
    DistributionComparison,
    make_columns,
    vocab_parallel_logprobs,
)
from msrl.trainer.objective.losses import Distillation, Outputs, PolicyLoss
from peer_oracle import peer_module

ROWS, VOCAB, PADDED, HIDDEN = 6, 11, 16, 5
BETAS = (0.1, 0.5, 0.9)
CASES: list[tuple[str, dict[str, float]]] = [
    ("reverse_kl", {}),
    ("forward_kl", {}),
    *(("jensen_shannon", {"beta": beta}) for beta in BETAS),
]
TOLERANCE: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-6}


def plugin(name: str, **options: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    module = registry.load(registry.DIVERGENCES, name, key="algo.distill.divergence")
    return functools.partial(module.divergence, **options)


def random_logits(seed: int, width: int = VOCAB, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        scale * torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return student, teacher


def exact(name: str, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return the divergences of two rows of log-probabilities, [R], in terms of torch."""
    p, q = student.exp(), teacher.exp()
    if name == "reverse_kl":
        return (p * (student - teacher)).sum(-1)
    if name == "forward_kl":
        return (q * (teacher - student)).sum(-1)
    mixture = (beta * q + (1 - beta) * p).log()
    terms = beta * q * (teacher - mixture) + (1 - beta) * p * (student - mixture)
    return terms.sum(-1)


@pytest.mark.parametrize("name", golden.DIVERGENCES)
def test_a_divergence_has_the_value_of_its_formula(name: str) -> None:
    student, teacher = (0.7, 0.2, 0.1), (0.25, 0.25, 0.5)
    rows = (torch.tensor([row], dtype=torch.float64).log() for row in (student, teacher))
    terms, _ = plugin(name)(*rows)
    assert terms.sum().item() == pytest.approx(golden.DIVERGENCES[name](student, teacher))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_slopes_give_the_gradient_of_automatic_differentiation(
    name: str, options: dict[str, float]
) -> None:
    student, teacher = random_logits(0)
    leaf = student.requires_grad_()
    expected = exact(name, leaf.log_softmax(-1), teacher.log_softmax(-1), **options)
    expected.sum().backward()
    logprobs = student.detach().log_softmax(-1)
    terms, slopes = plugin(name, **options)(logprobs, teacher.log_softmax(-1))
    torch.testing.assert_close(terms.sum(-1), expected.detach(), **TOLERANCE)
    gradient = slopes - logprobs.exp() * slopes.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, leaf.grad, **TOLERANCE)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_divergence_from_itself_is_zero_and_extreme_logits_stay_finite(
    name: str, options: dict[str, float]
) -> None:
    student, _ = random_logits(1)
    same = student.log_softmax(-1)
    terms, slopes = plugin(name, **options)(same, same)
    assert terms.sum(-1).abs().max() < 1e-12
    gradient = slopes - same.exp() * slopes.sum(-1, keepdim=True)
    assert gradient.abs().max() < 1e-12
    far = [x.float().log_softmax(-1) for x in random_logits(2, scale=300.0)]
    assert all(torch.isfinite(x).all() for x in plugin(name, **options)(*far))


# --- TRL ---


def trl_divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the sum over all positions."""
    trl: Any = peer_module("trl.experimental.gkd.gkd_trainer")
    return trl.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, temperature=0.7, reduction="sum"
    )


@pytest.mark.parametrize(
    ("name", "options", "beta"),
    [
        ("forward_kl", {}, 0.0),
        ("reverse_kl", {}, 1.0),
        *(("jensen_shannon", {"beta": beta}, beta) for beta in BETAS),
    ],
)
def test_a_divergence_has_the_value_and_the_gradient_of_trl(
    name: str, options: dict[str, float], beta: float
) -> None:
    student, teacher = random_logits(3)
    leaf = student.requires_grad_()
    expected = trl_divergence(leaf, teacher, beta)
    expected.backward()
    rows = [(x.detach() / 0.7).log_softmax(-1) for x in (student, teacher)]
    terms, slopes = plugin(name, **options)(*rows)
    gradient = (slopes - rows[0].exp() * slopes.sum(-1, keepdim=True)) / 0.7
    torch.testing.assert_close(terms.sum(), expected.detach(), **TOLERANCE)
    torch.testing.assert_close(gradient, leaf.grad, **TOLERANCE)


# --- rows of logits ---


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_rows", [None, 4])
@pytest.mark.parametrize("elements_at_once", [16, 40, 10_000])
def test_gradients_of_several_teachers_agree_with_torch_for_any_chunk_size(
    group: dist.ProcessGroup, elements_at_once: int, num_rows: int | None
) -> None:
    torch.manual_seed(0)
    columns = make_columns(
        PADDED,
        vocab_size=VOCAB,
        tp_rank=0,
        temperature=0.7,
        with_entropy=False,
        elements_at_once=elements_at_once,
        group=group,
    )
    hidden, head, labels = torch.randn(ROWS, HIDDEN), torch.randn(PADDED, HIDDEN), torch.arange(6)
    teachers = [torch.randn(PADDED, HIDDEN) for _ in CASES]
    factors = torch.randn(ROWS, len(CASES))

    leaf = hidden.double().requires_grad_()
    student = (leaf @ head.double().t())[:, :VOCAB].div(0.7).log_softmax(-1)
    teacher_logprobs = [
        (hidden @ t.t())[:, :VOCAB].double().div(0.7).log_softmax(-1) for t in teachers
    ]
    pairs = zip(CASES, teacher_logprobs, strict=True)
    expected = torch.stack([exact(n, student, q, **o) for (n, o), q in pairs], -1)
    (expected * factors).sum().backward()

    comparisons = [
        DistributionComparison(
            Distribution(
                hidden, lambda rows, t=t: rows @ t.t(), columns.normalizer(hidden @ t.t())
            ),
            plugin(name, **options),
        )
        for (name, options), t in zip(CASES, teachers, strict=True)
    ]
    own = hidden.clone().requires_grad_()
    if num_rows is None:
        actual = vocab_parallel_logprobs(own @ head.t(), labels, columns, comparisons)[2]
    else:
        actual = chunked_logprobs(
            own, head, labels, columns, num_rows=num_rows, comparisons=comparisons
        )[2]
    assert actual is not None
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    (actual * factors).sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


# --- the term of the loss ---


def test_the_term_adds_the_weighted_divergences_of_all_teachers_to_the_policy_loss() -> None:
    distillation = Distillation(0.5, {"a": 1.0, "b": 0.25}, "forward_kl")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    divergences = torch.tensor([[1.0, 4.0], [2.0, 8.0]], requires_grad=True)
    fields = {"advantages": torch.zeros(2), "weights": torch.full((2,), 0.5)}
    outputs = Outputs(logprobs, torch.tensor([0, 0]), divergences=divergences)
    loss = PolicyLoss(1.0, rl_coef=0.0, distillation=distillation, needs_entropy=False)
    value, sums = loss(outputs, fields, 2.0)
    # (1 + 4 / 4) / 2 + (2 + 8 / 4) / 2 = 3
    assert value.item() == pytest.approx(0.5 * 3) and sums["distill"].item() == pytest.approx(6.0)
    value.backward()
    assert divergences.grad is not None
    assert divergences.grad.flatten().tolist() == pytest.approx([0.25, 0.0625] * 2)
    assert [model.teacher for model in loss.compared] == ["a", "b"]


def test_the_exact_divergence_from_the_reference_comes_before_those_from_teachers() -> None:
    distillation = Distillation(1.0, {"a": 1.0}, "reverse_kl")
    loss = PolicyLoss(1.0, kl_coef=0.1, kl_estimator="full", distillation=distillation)
    assert [model.teacher for model in loss.compared] == [None, "a"]
    fields = {"advantages": torch.zeros(1), "weights": torch.ones(1)}
    outputs = Outputs(
        torch.tensor([-1.0]), torch.tensor([0]), divergences=torch.tensor([[3.0, 5.0]])
    )
    value, sums = loss(outputs, fields, 1.0)
    assert (sums["kl"].item(), sums["distill"].item()) == (3.0, 5.0)
    assert value.item() == pytest.approx(0.1 * 3 + 5)
