"""Right and wrong variants of the true answers of four datasets.

The generator labels a variant without comparing anything (`benchmarks/answer_variants.py`).
"""

from __future__ import annotations

import pytest
from benchmarks.answer_variants import RIGHT, WRONG, Variant, variants
from benchmarks.rewards import all_true_answers, misjudged_variants

from support import shared_data

MAX_WRONG_REJECTS = 2
RIGHT_EXAMPLES = {
    "integer_forms": ("1234", r"1{,}234"),
    "fraction_forms": (r"\frac{3}{4}", "0.75"),
    "sums": ("10t + 12", "12+10t"),
    "quantities": (r"90^\circ", "90°"),
}
WRONG_EXAMPLES = {
    "off_by_one": (r"\frac{3}{4}", r"\frac{3}{5}"),
    "signs": ("(1,2)", "( -1,2)"),
    "swapped_parts": (r"\frac{3}{4}", "4/3"),
    "truncated": (r"\frac{3}{4}", r"\frac{3}{"),
    "juxtaposed": ("60", "30 2"),
}


def misjudge(count: int, seed: int) -> tuple[list[Variant], list[Variant]]:
    """Return the wrong variants that are accepted and the right ones that are rejected."""
    answers = all_true_answers(shared_data("math"))
    sample = variants(answers, count, seed)
    assert len(sample) == count and {variant.is_right for variant in sample} == {True, False}
    mistakes = misjudged_variants(sample, num_workers=2)
    return (
        [variant for variant in mistakes if not variant.is_right],
        [variant for variant in mistakes if variant.is_right],
    )


@pytest.mark.slow
def test_a_sample_of_variants_of_true_answers_is_judged_rightly():
    wrong_accepts, wrong_rejects = misjudge(600, seed=1)
    assert wrong_accepts == []
    assert wrong_rejects == []


@pytest.mark.full
@pytest.mark.slow
def test_of_ten_thousand_variants_no_wrong_one_is_accepted_and_two_right_ones_are_rejected():
    wrong_accepts, wrong_rejects = misjudge(10_000, seed=0)
    assert wrong_accepts == []
    assert len(wrong_rejects) <= MAX_WRONG_REJECTS, wrong_rejects


def generate(truth: str, is_right: bool) -> set[tuple[str, str]]:
    sample = variants([truth], 10_000)
    return {(v.kind, v.response) for v in sample if v.is_right is is_right}


@pytest.mark.parametrize(
    ("kind", "truth", "text", "is_right"),
    [(kind, *pair, True) for kind, pair in RIGHT_EXAMPLES.items()]
    + [(kind, *pair, False) for kind, pair in WRONG_EXAMPLES.items()],
)
def test_the_generator_rewrites_by_its_rules(kind: str, truth: str, text: str, is_right: bool):
    responses = generate(truth, is_right)
    assert any(name == kind and text in response for name, response in responses)


@pytest.mark.full
@pytest.mark.slow
def test_all_rewritings_apply_to_some_true_answer_and_results_are_reproducible():
    answers = all_true_answers(shared_data("math"))
    sample = variants(answers, 4000, seed=5)
    names = {rewriting.__name__ for rewriting in (*RIGHT, *WRONG)}
    assert {variant.kind for variant in sample} == names
    assert sample == variants(answers, 4000, seed=5) != variants(answers, 4000, seed=6)
    assert not {(v.truth, v.response) for v in sample if v.is_right} & {
        (v.truth, v.response) for v in sample if not v.is_right
    }
