"""A table of cases for every verifier, mathematical equality, and real answers of GSM8K and
MATH-500.
"""

import json
import re
import time

import pytest

from msrl import registry
from msrl.limits import TimeLimitError
from msrl.rewards.math import equality
from msrl.rewards.math.equality import are_equal, boxed_formula, equal, formula
from msrl.rewards.math.extract import ground_truth, in_order, last_boxed
from msrl.rewards.math.notation import intervals, unify
from msrl.rewards.math.numbers import amount, is_qualified
from support import assert_mentions, shared_data

PACKAGE = "msrl.rewards.verifiers"
GOOD = r"<think> 7+5=12 </think><answer> \boxed{132} </answer>"

# name -> rows of (response, ground truth, score)
IFEVAL = [  # constraint, arguments, text behind the thought, score
    ("verify_keywords", {"keyword_list": ["One", "two"]}, "one and TWO", 1.0),
    ("verify_keywords", {"keyword_list": ["one", "two"]}, "one", 0.0),
    ("verify_keyword_frequency", {"word": "Go", "N": 2}, "go, go! gopher", 1.0),
    ("verify_keyword_frequency", {"word": "go", "N": 2}, "go and stop", 0.0),
    ("validate_forbidden_words", {"forbidden_words": ["war"]}, "peace", 1.0),
    ("validate_forbidden_words", {"forbidden_words": ["war"]}, "Warm", 0.0),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "a bA a", 1.0),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "a", 0.0),
    ("verify_paragraph_count", {"N": 2, "quantifier": None}, "a\n* * *\nb", 1.0),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\n ", 0.0),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 22, 1.0),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 23, 0.0),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a", 0.0),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a", 1.0),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, "Dr. A? Yes. No.", 0.0),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "around"}, "Dr. A? Yes. No.", 1.0),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", 1.0),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 1}, "a\n\nSo b", 0.0),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S. b", 1.0),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S.", 0.0),
    ("validate_placeholders", {"N": 2}, "[a] [b] [c]", 1.0),
    ("validate_placeholders", {"N": 2}, "[a]", 0.0),
    ("verify_bullet_points", {"N": 2}, "* a\n - b", 1.0),
    ("verify_bullet_points", {"N": 2}, "* a\n- b\n- c", 0.0),
    ("validate_title", {}, "<<a>>", 1.0),
    ("validate_title", {}, "<a>", 0.0),
    ("validate_choice", {"options": ["My answer is yes.", "no"]}, "My answer is yes.", 1.0),
    ("validate_choice", {"options": ["yes", "no"]}, "maybe", 0.0),
    ("validate_choice", {"options": "(My answer is yes.)"}, "My answer is yes.", 1.0),
    ("validate_choice", {"options": "yes"}, "no", 0.0),
    ("validate_choice", {"options": ["yes", "no"]}, "", 0.0),
    ("validate_highlighted_sections", {"N": 2}, "*a* *b*", 1.0),
    ("validate_highlighted_sections", {"N": 2}, "*a*", 0.0),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", 1.0),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a", 0.0),
    ("validate_json_format", {}, '{"a": 1}', 1.0),
    ("validate_json_format", {}, "[" * 100_000, 0.0),
    ("validate_repeat_prompt", {"original_prompt": "Say a"}, "Say a. a", 1.0),
    ("validate_repeat_prompt", {"original_prompt": "Say a"}, "a", 0.0),
    ("validate_two_responses", {}, "a ****** b", 1.0),
    ("validate_two_responses", {}, "a ****** a", 0.0),
    ("validate_two_responses", {}, "a ****** b ****** c", 0.0),
    ("validate_uppercase", {}, "A 1", 1.0),
    ("validate_uppercase", {}, "Aa", 0.0),
    ("validate_lowercase", {}, "a 1", 1.0),
    ("validate_lowercase", {}, "Aa", 0.0),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, "OK GO x", 1.0),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, "OK", 0.0),
    ("validate_end", {"end_phrase": "Bye."}, "So. Bye.", 1.0),
    ("validate_end", {"end_phrase": "Bye."}, "Bye. So.", 0.0),
    ("validate_quotation", {}, '"a"', 1.0),
    ("validate_quotation", {}, '"a', 0.0),
    ("validate_no_commas", {}, "a", 1.0),
    ("validate_no_commas", {}, "a, b", 0.0),
]
BOX = "[0, 0, 1, 1]"
CAT = '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]'
CASES = {
    "acc": [
        (r"so \boxed{132}", "132", 1.0),
        (r"so \boxed{131}", "132", -0.5),
        ("the answer is 132", "132", -1.0),
        (r"\boxed{} 132", "132", -1.0),
        (r"\boxed{132", "132", -1.0),
        ("", "132", -1.0),
        (r"first \boxed{5}, no, \boxed{132}", "132", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{3.14159}", r"\pi", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{0.5}", "50", 1.0),
        (r"\boxed{0.33333}", r"\frac{1}{3}", 1.0),
        (r"\boxed{0.3}", r"\frac{1}{3}", -0.5),
        (r"\boxed{100001}", "100000", -0.5),
        (r"\boxed{72}", "She has 24+48=72 apples.\n#### 72", 1.0),
    ],
    "base_acc": [
        (GOOD, "132", 1.0),
        (GOOD + "\n", "132", 1.0),
        ("\n" + GOOD, "132", 1.0),
        ("<think>\na\nb\n</think>\n\nso\n<answer>it is\n\\boxed{132}.\n</answer>\n\n", "132", 1.0),
        (GOOD, "131", 0.0),
        (r"<think> x </think> \boxed{132}", "132", 0.0),
        (r"<think> \boxed{132} </think><answer> 132 </answer>", "132", 0.0),
        (r"<answer> \boxed{132} </answer><think> x </think>", "132", 0.0),
        (GOOD + " and more", "132", 0.0),
        (r"\boxed{132}", "132", 0.0),
        (r"<think> x </think><answer> \boxed{0.33333} </answer>", r"\frac{1}{3}", 0.0),
        ("", "132", 0.0),
    ],
    "math_17k_acc": [
        (r"\boxed{132}", "132", 1.0),
        (r"\boxed{ 132 } is it", "132", 1.0),
        (r"\boxed{131}", "132", 0.0),
        ("132", "132", 0.0),
        (r"\boxed{\dfrac{14}{3}}", r"\frac{14}{3}", 1.0),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{50}", "0.5", 0.0),
    ],
    "format": [
        (GOOD, "", 1.0),
        ("<think>a</think>\n \n<answer>b</answer>", "", 1.0),
        ("<think>a</think><answer>b</answer>\n", "", 1.0),
        ("<think>a</think><answer>b</answer>\nrambling", "", 1.0),
        ("<think>a</think><answer>b</answer> rambling", "", 0.0),
        ("<think>a</think> so <answer>b</answer>", "", 0.0),
        (" <think>a</think><answer>b</answer>", "", 0.0),
        ("<think>a<answer>b</answer>", "", 0.0),
        ("<answer>b</answer>", "", 0.0),
        ("", "", 0.0),
    ],
    "strict_format": [
        (GOOD, "", 1.0),
        (GOOD + "\n", "", 1.0),
        (GOOD + " x", "", -0.5),
        (GOOD + GOOD, "", -0.5),
        (r"<think>a</think><answer>\boxed{1}\boxed{2}</answer>", "", -0.5),
        (r"<think>\boxed{1}</think><answer>2</answer>", "", -0.5),
        (r"<think>a</think><answer>\boxed{1</answer>", "", -0.5),
        ("<think>a</think><answer>2</answer>", "", -0.5),
        ("", "", -0.5),
    ],
    "acc_for_ppo": [
        (r"\boxed{132}", "132", 1.0),
        (r"<think> x </think> \boxed{ 132 }", "132", 1.0),
        (r"\boxed{131}", "132", 0.0),
        ("132", "132", 0.0),
    ],
    "acc_for_dapo": [
        ("so\nAnswer: 34", "34", 1.0),
        ("ANSWER :34\n", "34", 1.0),
        ("Answer: 33\nno, answer: 34", "34", 1.0),
        ("Answer: $34$ or so", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: x = 5 dollars", "5", 1.0),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
        ("Answer: 0.5", r"\frac{1}{2}", -1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),
        ("Answer:\n34", "34", 1.0),
        ("34", "34", -1.0),
        ("Answer: 35", "34", -1.0),
        ("Answer: feet", "square", -1.0),
        ("Answer: square", "square", 1.0),
        ("Answer: $", "hours", -1.0),
        ("", "34", -1.0),
    ],
    "math_verify_reward": [
        (GOOD, "132", 1.0),
        (GOOD + "\n", "132", 1.0),
        (r"<think>a</think><answer>\boxed{\frac{2}{4}}</answer>", "0.5", 1.0),
        (r"<think>a</think><answer>\boxed{x=5}</answer>", "5", 1.0),
        (GOOD, "131", 0.0),
        (r"\boxed{132}", "132", 0.0),
        (r"<think>a</think><answer>132</answer>", "132", 0.0),
        (r"<think>a</think><answer>\boxed{1}" + "1" * 5000 + "</answer>", "132", 0.0),
        ("", "132", 0.0),
    ],
    "retool_reward": [
        (r"so \boxed{34}", "34", 1.0),
        (r"so \boxed{34.0}", "34", -1.0),
        (r"\boxed{34}" + " " * 100, "34", -1.0),
        (r"<tool_call>{}</tool_call> <tool_call>{}</tool_call> \boxed{3}", "34", -0.8),
        ("</tool_call>" * 50, "34", 0.0),
        ("", "34", -1.0),
    ],
    "step": [
        ("Step 1: a\nStep 2: b\nStep 3: c", "", 1.0),
        ("1. a\n2. b", "", 2 / 3),
        ("a\n- b\n* c\nFinally, d\nNext, e", "", 1.0),
        ("First, a", "", 1 / 3),
        ("a 1. b", "", 0.0),
        ("", "", 0.0),
    ],
    "exact_match": [
        (" Paris\n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("It is Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
    "multiple_choice": [
        (r"so \boxed{B}", "B", 1.0),
        (r"so \boxed{\text{(B)}}", "B", 1.0),
        ("<think>A</think><answer> (B) </answer>", "B", 1.0),
        ("The answer is A. No, the answer is (b).", "B", 1.0),
        ("The answer is B because it is round", "B", 1.0),
        ("**Answer:** B", "B", 1.0),
        ("Answer: B) Paris", "(B) Paris", 1.0),
        ("thinking of A\nB.", "B", 1.0),
        ("The answer is A or B", "B", 0.0),
        ("The answer is A, B", "A", 0.0),
        (r"\boxed{B\text{ or }C}", "B", 0.0),
        (r"\boxed{B; C}", "B", 0.0),
        (r"\boxed{\text{B} \text{ and } \text{C}}", "B", 0.0),
        (r"\boxed{(B)(C)}", "B", 0.0),
        (r"\boxed{B\quad C}", "B", 0.0),
        (r"\boxed{B \lor C}", "B", 0.0),
        (r"\boxed{\textbf{(B)}\ 7}", "B", 1.0),
        ("The answer is B, not C", "B", 1.0),
        ("The correct answer is option C", "C", 1.0),
        ("so\nC) Paris", "C", 1.0),
        (r"The answer is \(B\)", "B", 1.0),
        ("**Answer**: B", "B", 1.0),
        ("答案是 B", "B", 1.0),
        ("The answer is B. A is a distractor.", "B", 1.0),
        ("The answer is A, I think", "A", 1.0),
        ("Answer: A (or B)", "A", 0.0),
        ("Answer: A. Or maybe B.", "A", 0.0),
        ("Answer: A-D", "A", 0.0),
        ("Answer: A to D", "A", 0.0),
        ("Answer: (A)(B)(C)(D)", "A", 0.0),
        ("Answer: A, no wait B", "A", 0.0),
        ("Answer: A、B、C", "A", 0.0),
        ("The answer is a dog", "A", 0.0),
        ("The answer is Bob", "B", 0.0),
        ("The answer is: I am not sure.", "I", 0.0),
        ("The answer is I don't know", "I", 0.0),
        ("Answer: I\u2019m not sure", "I", 0.0),
        ("The answer is I because it is round", "I", 1.0),
        ("The answer is I is right", "I", 1.0),
        ("The answer is I.", "I", 1.0),
        ("Answer: I) Paris", "I", 1.0),
        (r"The answer is B, so \boxed{A}", "B", 0.0),
        ("B is one that I think of", "B", 0.0),
        ("the answer to it is open", "B", 0.0),
        (r"\boxed{C}", "2", 1.0),
        ("", "B", 0.0),
    ],
    "crossthinkqa": [
        (r"<think>\boxed{A}</think> so \boxed{B}", "B", 1.0),
        (r"\boxed{the answer B}, or \boxed{(C) Paris}", "C) Paris", 1.0),
        ("I think the answer is b or B, not A", "B", 1.0),
        ("B", "B", 1.0),
        ("The first capital counts: B", "B", -1.0),
        (r"\boxed{A}", "B", -1.0),
        (r"\boxed{1}", "B", -1.0),
        ("", "B", -1.0),
    ],
    "ifeval": [
        *(
            (f"<think>no</think>\n{text}", json.dumps({"func_name": name, **arguments}), score)
            for name, arguments, text, score in IFEVAL
        ),
    ],
    "repetition": [
        ("one two three four five six", "", 0.0),
        ("a b c d " * 5, "", -(1 - 4 / 17)),
        ("no " * 203, "", -(1 - 1 / 200)),
        ("好" * 13, "", -0.9),
        ("short", "", 0.0),
        ("", "", 0.0),
    ],
    "verl": [
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{3} and \boxed{4}", "4", 1.0),
        (r"\boxed{x=5}", "5", 1.0),
        (r"\boxed{2/4}", r"\frac{1}{2}", 0.0),
        ("the answer is 4", "4", 0.0),
    ],
    "regex_match": [
        ("<think>\na\n</think> yes", "", 1.0),
        ("yes <think>a</think>", "", 0.0),
        ("", "", 0.0),
    ],
    "regex_answer": [
        ("#### 5\n#### 1,234", "1234", 1.0),
        ("#### 3/4", "0.75", 1.0),
        ("#### 5", "1234", 0.0),
        ("5", "5", 0.0),
        ("", "5", 0.0),
    ],
    "box_iou": [  # overlaps: 1; 50 / 150; 25 / 175; 60 / 140
        ("[0, 0, 10, 10]", "[0, 0, 10, 10]", 1.0),
        ("[5, 0, 15, 10]", "[0, 0, 10, 10]", 1 / 3),
        ('```json\n[{"bbox_2d": [5, 5, 15, 15], "label": "Cat"}]\n```', CAT, 1 / 7),
        ('<think>[9]</think><answer>{"bbox": [0, 0, 10, 10], "label": "cat "}</answer>', CAT, 1.0),
        ('[{"bbox_2d": [0, 0, 10, 10], "label": "dog"}]', CAT, 0.0),
        ("[[0, 0, 10, 10], [50, 50, 60, 60]]", "[0, 0, 10, 10]", 0.5),
        ("[0, 0, 10, 10]", "[[0, 0, 10, 10], [50, 50, 60, 60]]", 0.5),
        ("[[1, 0, 11, 10], [0, 0, 10, 10]]", "[[0, 0, 10, 10], [5, 0, 15, 10]]", 5 / 7),
        ('first [9, 9, 10, 10], then {"boxes": [[0, 0, 10, 10]]}', "[0, 0, 10, 10]", 1.0),
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", 0.0),
        ("none: []", "[]", 1.0),
        ("none", "[]", 0.0),
        ("[0, 0, 10, 10]", "[]", 0.0),
        ("<think>[0, 0, 10, 10]", "[0, 0, 10, 10]", 0.0),
    ],
}
NEEDS_A_SANDBOX = {"code"}  # cases in test_rewards_sandbox.py
NEEDS_A_PACKAGE = {"reasoning_gym"}  # cases in test_reasoning_tasks.py
OPTIONS = {
    "regex_match": {"pattern": r"^<think>.*</think>"},
    "regex_answer": {"pattern": r"#### *(\S+)"},
}  # where a verifier needs some


def verifier(name):
    return registry.load(PACKAGE, name, key="reward.sources[0].verifier")


@pytest.mark.parametrize("name", CASES)
def test_a_verifier_scores_its_cases(name):
    module = verifier(name)
    options = OPTIONS.get(name, {})
    assert registry.check_options(module.score, options, key="options") == options
    assert not hasattr(module, "refusal") or module.refusal(**options) is None
    got = [
        (response, answer, module.score(response, answer, **options))
        for response, answer, _ in CASES[name]
    ]
    assert got == [
        (response, answer, pytest.approx(score, abs=1e-12))
        for response, answer, score in CASES[name]
    ]
    assert (
        module.WRONG in {score for *_, score in CASES[name]}
        or min(score for *_, score in CASES[name]) > module.WRONG
    )
    assert isinstance(module.NEEDS_ANSWER, bool)


@pytest.mark.parametrize(
    ("name", "options", "response", "answer", "score"),
    [
        ("exact_match", {"part": "last_line"}, "It is\n Paris ", "Paris", 1.0),
        (
            "exact_match",
            {"part": "answer", "ignore_case": True},
            "<think>a</think><answer> PARIS </answer>.",
            "Paris",
            1.0,
        ),
        ("exact_match", {"part": "boxed"}, "<answer>Paris</answer>", "Paris", 0.0),
        ("multiple_choice", {"first": 1}, "(C)", "3", 1.0),
        ("multiple_choice", {"letters": 4}, "(E)", "E", 0.0),
        ("regex_answer", {"pattern": "is (.+)", "compare": "text"}, "it is 0.50", "0.5", 0.0),
        (
            "regex_answer",
            {"pattern": "IS (.+)", "compare": "text", "ignore_case": True},
            "it is bob",
            "Bob",
            1.0,
        ),
        ("acc_for_dapo", {"tail": 5}, "Answer: 34", "34", -1.0),
        (
            "retool_reward",
            {"tool_bonus": 0.25, "tool_end": "</code>"},
            "</code></code>",
            "34",
            -0.5,
        ),
        ("repetition", {"ngram": 1, "max_penalty": 2.0}, "a a a a", "", -1.5),
        ("repetition", {"ngram": 2}, "a", "", 0.0),
        ("repetition", {"ngram": 1, "words": "spaces"}, "a, a a, b", "", -0.25),
        ("crossthinkqa", {"reward_type": "soft"}, "B", "B", 0.5),
        ("crossthinkqa", {"reward_type": "soft"}, r"\boxed{B}", "B", 1.0),
        ("crossthinkqa", {"reward_type": "soft"}, r"\boxed{A}", "B", -0.5),
        ("crossthinkqa", {"reward_type": "soft"}, "A", "B", -1.0),
        ("crossthinkqa", {"reward_type": "strict"}, "B", "B", -1.0),
        ("crossthinkqa", {"reward_type": "strict"}, r"\boxed{B}", "B", 1.0),
        ("box_iou", {"threshold": 0.5}, "[5, 0, 15, 10]", "[0, 0, 10, 10]", 0.0),
        ("box_iou", {"threshold": 0.5, "counts": "hits"}, "[1, 0, 10, 10]", CAT, 0.0),
        ("box_iou", {"counts": "hits", "labels": False}, "[1, 0, 10, 10]", CAT, 1.0),
        ("box_iou", {"extra_boxes": "ignored"}, "[[0, 0, 1, 1], [9, 9, 10, 10]]", BOX, 1.0),
    ],
)
def test_an_option_changes_the_score(name, options, response, answer, score):
    module = verifier(name)
    assert registry.check_options(module.score, options, key="options") == options
    assert module.score(response, answer, **options) == score


@pytest.mark.parametrize(
    ("name", "options", "fragments"),
    [
        ("regex_match", {}, ("options.pattern",)),
        ("regex_match", {"pattern": "("}, ("regular expression",)),
        ("regex_answer", {"pattern": "a"}, ("0 groups",)),
        ("regex_answer", {"pattern": "(a)(b)"}, ("2 groups",)),
        ("multiple_choice", {"letters": 1}, (2, 26)),
        ("repetition", {"ngram": 0}, ("ngram", "1")),
        ("repetition", {"max_penalty": -1.0}, ("max_penalty", 0)),
        ("box_iou", {"threshold": 50.0}, ("threshold", "50.0", 1)),
    ],
)
def test_an_invalid_option_is_refused(name, options, fragments):
    assert_mentions(verifier(name).refusal(**options), *fragments)


@pytest.mark.parametrize(
    ("truth", "fragments"),
    [
        ("yes", ("JSON", "func_name", "yes")),
        ("[1]", ("JSON", "func_name")),
        ('{"func_name": "validate_rhyme"}', ("validate_rhyme", "unknown", "validate_title")),
        ('{"func_name": "validate_response_language"}', ("language detector",)),
        ('{"func_name": "verify_keywords"}', ("verify_keywords", "keyword_list=None")),
        ('{"func_name": "verify_bullet_points", "N": "3"}', ("N='3'", "type")),
        (
            '{"func_name": "validate_word_constraint", "N": 3, "quantifier": "more"}',
            ("quantifier='more'",),
        ),
        (
            '{"func_name": "validate_word_constraint", "N": %s, "quantifier": "around"}'
            % ("9" * 400),
            ("N", "too large"),
        ),
        ('{"func_name": ["validate_title"]}', ("unknown",)),
        ("[" * 100_000, ("JSON",)),
    ],
)
def test_an_instruction_that_no_text_rule_can_check_is_refused(truth, fragments):
    assert_mentions(verifier("ifeval").answer_refusal(truth), *fragments)
    assert verifier("ifeval").answer_refusal('{"func_name": "validate_title", "N": null}') is None


HOSTILE_BOXES = [
    "[" * 200_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000,
    "[[0, 0, 10, 10]" * 20_000,
    f"[{', '.join(['[0, 0, 10, 10]'] * 10_000)}]",
    f"[0, 0, {'9' * 100_000}, 10]",
    "x" * 10_000_000 + "[0, 0, 10, 10]",
    "[NaN, 0, 10, 10]",
    "[0, 0, Infinity, 10]",
    "[0, 0, 1e999, 10]",
    f"[0, 0, {'9' * 400}, 10]",
    "[0, 0, 1e308, 1e308]",
    "[0, 0, 0, 10]",
    "[0, 0, 5e-324, 5e-324]",
    "[false, 0, 10, 10]",
    '[{"bbox_2d": {"0": 1}}]',
    '[{"bbox_2d": "[0, 0, 10, 10]"}]',
    "[0, 0, 10]",
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("response", HOSTILE_BOXES, ids=range(len(HOSTILE_BOXES)))
def test_hostile_boxes_overlap_with_nothing(response):
    module, started = verifier("box_iou"), time.process_time()
    assert module.score(response, "[0, 0, 10, 10]") == 0.0
    assert module.answer_refusal(response)
    module.explain(response, "[0, 0, 10, 10]")
    assert time.process_time() - started < 5


def test_many_boxes_are_compared_within_the_time_limit_of_a_verifier():
    boxes = [[i, i % 7, i + 30, 40] for i in range(300)]
    answer, started = json.dumps(boxes), time.process_time()
    assert verifier("box_iou").score(answer, answer) == 1.0
    assert time.process_time() - started < 5


def test_every_constraint_has_a_right_and_a_wrong_case():
    scores = {name: {score for n, _, _, score in IFEVAL if n == name} for name, *_ in IFEVAL}
    assert scores == {name: {0.0, 1.0} for name in verifier("ifeval").CONSTRAINTS}


def test_the_form_of_format_is_that_of_its_regular_expression():
    pattern = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)
    pieces = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"]
    responses = [""]
    for _ in range(6):
        responses += [r + p for r in responses[-(7**4) :] for p in pieces if len(r) < 60][: 7**5]
    responses += ["<think>" + r for r in responses] + [
        f"<think>{a}</think>{b}<answer>{a}</answer>{b}" for a in pieces for b in pieces
    ]
    score = verifier("format").score
    assert all(score(r, "") == float(pattern.match(r) is not None) for r in set(responses))
    assert sum(score(r, "") for r in set(responses)) > 10


EMPTY = [
    "",
    " ",
    "####",
    "so it is\n#### ",
    "\\boxed{}",
    "\\boxed{ }",
    "$$",
    "$ $",
    ".",
    "\\(\\)",
    "{}",
]
MATHEMATICAL = [
    "acc",
    "acc_for_dapo",
    "acc_for_ppo",
    "base_acc",
    "math_17k_acc",
    "math_verify_reward",
    "regex_answer",
    "retool_reward",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("truth", EMPTY)
def test_a_ground_truth_without_an_answer_scores_zero_and_is_refused(truth):
    contents = [
        "",
        " ",
        "0",
        "x",
        "None",
        "\\text{}",
        "$",
        "####",
        ".",
        "()",
        "\\{\\}",
        "\\boxed{}",
        "\\boxed{0}",
        "\\emptyset",
    ]
    responses = [
        form % text
        for text in contents
        for form in ("%s", "\\boxed{%s}", "Answer: %s", "#### %s", "<answer>%s</answer>")
    ]
    responses += [f"<think>a</think><answer>\\boxed{{{text}}}</answer>" for text in contents]
    for name in [*MATHEMATICAL, "multiple_choice"]:
        module, options = verifier(name), OPTIONS.get(name, {})
        paid = [text for text in responses if module.score(text, truth, **options) > module.WRONG]
        assert not paid, name
        assert not truth.strip() or module.answer_refusal(truth, **options) is not None, name


def test_a_ground_truth_with_an_answer_is_not_refused():
    truths = [
        "0",
        "-1",
        "x",
        "7.",
        "()",
        "(1,2)",
        "[1, 2)",
        "\\{\\}",
        "\\emptyset",
        "#### 0",
        "\\boxed{0}",
        "$5$",
        "None",
        "{1}",
        "∞",
        "½",
    ]
    for name in MATHEMATICAL:
        refused = [
            truth
            for truth in truths
            if verifier(name).answer_refusal(truth, **OPTIONS.get(name, {}))
        ]
        assert refused == [], name
    choice = verifier("multiple_choice")
    assert [choice.answer_refusal(truth) for truth in ("A", "(b) Paris", "3", "C. 5")] == [None] * 4
    assert all(
        choice.answer_refusal(truth, letters=4)
        for truth in ("Paris", "E", "4", "A or B", "AB", "-1")
    )
    assert choice.answer_refusal("0", first=1) and choice.answer_refusal("1", first=1) is None
    assert verifier("regex_match").score("anything", "") == 0.0


def test_step_counts_numbers_as_mindspeed_rl_does_if_asked():
    score = verifier("step").score
    response = "1. a\n2. b\n3. c"
    assert score(response, "") == 1.0
    assert score(response, "", numbers="response") == pytest.approx(1 / 3)
    assert score("a\n" + response, "", numbers="response") == 0.0
    assert score("Step 1: a\n- b\nNext, c", "", numbers="response") == 1.0


def test_options_of_acc_narrow_what_it_accepts():
    score = verifier("acc").score
    assert score(r"\boxed{0.5}", "50", percent=False) == -0.5
    assert score(r"\boxed{0.33333}", r"\frac{1}{3}", tolerance=0.0) == -0.5
    assert score(r"\boxed{3.14}", r"\pi", tolerance=0.01) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{a}\boxed{ b }", "b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{1", None),
        (r"\boxed{ }", None),
        ("boxed 1", None),
        ("", None),
    ],
)
def test_the_last_box_is_read_with_its_nested_braces(text, expected):
    assert last_boxed(text) == expected


def test_a_ground_truth_is_read_after_hashes_or_in_a_box():
    assert ground_truth("so 3+4=7\n#### 7") == "7"
    assert ground_truth(r"thus \boxed{x^2}") == "x^2"
    assert ground_truth(" 1,234 ") == "1,234"


def test_in_order_requires_consecutive_parts():
    assert in_order("a b c", ["a", "b", "c"])
    assert not in_order("a c b", ["a", "b", "c"])
    assert not in_order("aa", ["a", "a", "a"])


EQUAL = [
    ("1,234", "1234"),
    ("$18", "18"),
    (r"\$18.00", "18"),
    ("42", "42.0"),
    ("-3", "- 3"),
    (".5", "0.50"),
    ("3/4", r"\frac{3}{4}"),
    ("10^{5}", "100000"),
    ("p - q", "-q + p"),
    (r"90^\circ", "90"),
    (r"3\sqrt{13}", r"\sqrt{117}"),
    ("6 - 5i", "-5i+6"),
    ("1,-2", "-2, 1"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"\text{Evelyn}", "evelyn"),
    ("Evelyn", r"\text{Evelyn}"),
    ("(C)", "C."),
    ("C", r"\text{(C)}"),
    (r"(-\infty, 2)", r"\left(-\infty,2\right)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("10 \\text{ inches}", "10"),
    ("7.", "7"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
    ("5", r"\(5\)"),
    ("120_5", "120_{5}"),
    ("120_{5}", "35_{10}"),
    ("1011_2", "(1011)_2"),
    ("3+4i", "3 + 4 i"),
    ("3:4", r"3\colon 4"),
    (r"3\,600", "3600"),
    ("1 000 000", "1000000"),
    (r"\frac{1}{2004!}", r"\frac{2}{2\cdot 2004!}"),
    ("x=1,y=2", "1, 2"),
    ("x=1,y=2", "y=2, x=1"),
    ("x=2,x=-3", "-3,2"),
    (r"6\text{ feet }2\text{ inches}", "6 feet, 2 inches"),
    ("1,2,1", "1,1,2"),
    ("6 feet 2 inches", "74 inches"),
    ("2.5 hours", "2 hours and 30 minutes"),
    ("3 apples, 2 pears", "3 apples and 2 pears"),
    (r"5\!:\!30\text{ p.m.}", "5:30 PM"),
    ("5:30 pm", "17:30"),
    ("5:30 pm", "5:30"),
    ("8", "8 PM"),
    ("xyz", "x y z"),
    ("xyz", "zyx"),
    ("xyz", r"x\cdot y\cdot z"),
    ("xyz", r"x \times y * z"),
    ("abc", r"$a\,b\,c$"),
    ("abc", r"\text{abc}"),
    ("abc", "(abc)."),
    ("yes", "YES"),
    ("8", "8:00 a.m."),
    ("3:30", "3:30 PM"),
    ("12:15", "12:15 AM"),
    ("0:15", "12:15 AM"),
    ("17:30", "5:30 pm"),
    ("3 am", "3:00 a.m."),
    ("x_1", "x_{1}"),
    (r"\frac{\pi}{2}", "pi/2"),
    ("5", "5=x"),
    ("y=2x+1", "2x+1"),
    ("f(x)=x^2", "x^2"),
    ("3", "x+y=3"),
    ("58,500", "58, 500"),
    ("11111", r"11,\! 111"),
    (r"(-\infty,5)", "x<5"),
    ("x<5", r"(-\infty,5)"),
    (r"9 \frac{1}{11}\%", r"9\dfrac{1}{11}\%"),
    ("(1, 2)", "{(1,2)}"),
    (r"2.5\times 10^{-8}", "0.000000025"),
    (r"\frac{\pi}{1000}", "0.003142"),
    ("0.0005", r"0.05\%"),
    ("0.5", r"50\%"),
    ("1800", "1~800"),
    ("1800", "1 800"),
    ("1800", r"1800~\text{miles}"),
    (r"11,\! 111", r"11111 \text{ miles}"),
    (r"120^\circ", "120°"),
    (r"120^\circ", r"120\degree"),
    ("(2,4)", r"\bigl(2,4\bigr)"),
    ("(C)", r"\textit{C}"),
    ("10t + 12", "12+10t"),
    ("6+9i", "9i+6"),
    ("19/2", "9 1/2"),
    ("42", "52_8"),
    ("18", "18 USD"),
    ("18", "€18"),
    ("12345", r"12\thinspace345"),
    ("12345", "12\u202f345"),
    ("-5", "\u20135"),
    ("-5", "{-}5"),
    (r"\frac{3}{4}", "\u00be"),
    ("2.5", "2\u00bd"),
    ("x^{2}", "x\u00b2"),
    ("2x", "2\u00b7x"),
    (r"\infty", "\u221e"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"1.2\overline{3}", r"\frac{37}{30}"),
    ("150000", "1.5e5"),
    (r"6.02\times10^{23}", r"602\times10^{21}"),
    ("10^{10}", "1e10"),
    (r"12.5\%", r"12\frac12\%"),
    (r"(-\infty,5)", r"]-\infty,5["),
    ("[1,2]", "[1;2]"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }x>2"),
    ("(3,5)", r"\{x \mid 3<x<5\}"),
    (r"\{1,2\}", r"\lbrace 1,2\rbrace"),
    (r"\emptyset", r"\varnothing"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}"),
    (r"\text{Monday}", r"\emph{Monday}"),
    (r"\text{Monday}", r"\operatorname{monday}"),
    ("10", r"{5\choose2}"),
    ("2:30 PM", r"2:30\text{ pm}"),
    (r"\text{9:00 a.m.}", "9:00 a.m."),
    ("25", "25 people"),
    ("25", r"\text{25 people}"),
    ("2.5", "2 1/2 hours"),
    ("1.5 hours", "90 minutes"),
    (r"1\text{ m}^2", r"10000\text{ cm}^2"),
    ("5 million", "5,000,000"),
    ("5 dollars", "500 cents"),
    ("no solution", r"\text{No Solution}"),
    (r"\ln x", r"\log_e x"),
    (r"\ln 2", r"\log_{e} 2"),
    (r"\ln(x+1)", r"\log_{\mathrm{e}}(x+1)"),
    (r"\frac{1+i}{2}", "0.5+0.5i"),
    (r"\frac{3+4i}{5}", "0.6 + 0.8i"),
    ("0.5-0.5i", r"\frac{1-i}{2}"),
    ("24", "24 sq. cm"),
    (r"24\text{ cm}^2", r"24\text{ sq. cm}"),
    (r"24\text{ cm}^2", "24 cm squared"),
    (r"24\text{ cm}^2", "24 square centimeters"),
    (r"24\text{ cm}^3", "24 cubic cm"),
    ("24", "24 sq. units"),
    ("24", "24 sq units"),
    ("7", r"\underline{7}"),
    ("7", r"\underline{\underline{7}}"),
    ("7", r"\textcolor{red}{7}"),
    ("7", r"\color{blue}{7}"),
    ("7", r"\color{blue} 7"),
    ("7", r"\fbox{7}"),
    ("7", r"\boldsymbol{7}"),
    (r"\frac{1}{2}", r"\underline{\frac{1}{2}}"),
    ("7", r"x = \underline{7}"),
    ("25", r"25\frac{\text{miles}}{\text{hour}}"),
    (r"25\text{ mph}", r"25\ \frac{\text{miles}}{\text{hour}}"),
    (r"25\text{ mph}", r"\frac{25\text{ miles}}{\text{hour}}"),
    (r"9.8\text{ m/s}^2", r"9.8\,\frac{\mathrm{m}}{\mathrm{s}^2}"),
    (r"2\text{ ft}^3/\text{s}", r"2\frac{\text{ft}^3}{\text{s}}"),
    ("60 per hour", "1 per minute"),
    ("48 people per day", "2 people per hour"),
    ("20 rev/min", r"20\text{ rev/min}"),
    (r"\frac{3}{4}", r"\frac{\bm{3}}{4}"),
    ("8", r"\boldsymbol{8}"),
    ("5\u5398\u7c73", "5"),
    ("5\u5398\u7c73", "5 \u5398\u7c73"),
    (r"5\text{\u5398\u7c73}", "5 cm"),
    ("3\u5c0f\u65f6", "180\u5206\u949f"),
    ("2\u5c0f\u65f630\u5206\u949f", "150 minutes"),
    ("5\u5343\u514b", "5 kg"),
    ("6\u5e73\u65b9\u5398\u7c73", r"6\text{ cm}^2"),
    ("100000", "10\u4e07"),
    ("10\u4e07\u5143", "100000\u5143"),
    ("12", "12\u4eba"),
]
DIFFERENT = [
    ("5\u5398\u7c73", "5\u7c73"),
    ("3\u5c0f\u65f6", "3\u5206\u949f"),
    ("5\u5343\u514b", "5\u514b"),
    ("10\u4e07", "10\u4ebf"),
    ("6\u5e73\u65b9\u7c73", "6\u7acb\u65b9\u7c73"),
    ("5 cm", "5 m"),
    ("5 hours", r"5\text{ minutes}"),
    (r"6\text{ cm}^2", r"6\text{ cm}^3"),
    ("60 miles/hour", "60 km/hour"),
    ("60 per hour", "3600 per minute"),
    ("5 per hour", "5 hours"),
    ("20 people/day", "20 people/week"),
    ("20 rev/min", "20 rev/s"),
    ("15 m/s", r"1\frac{5\text{ m}}{\text{s}}"),
    ("10", r"\frac{10\text{x}}{\text{y}}"),
    ("5", r"5\frac{\text{a}}{\text{b}}"),
    ("2", r"\sqrt\bm{12}"),
    (r"\frac34", r"\frac\bm{34}"),
    (r"\frac34\cdot5", r"\frac3\bm{45}"),
    (r"5\sqrt3", r"\sqrt\bm{35}"),
    ("8", r"2^ \underline{3}"),
    ("8", r"2^{ \underline{3}}"),
    ("$25", "25 cents"),
    ("5", r"5\text{ thousand}"),
    ("5 million", "5 billion"),
    ("5", "5 dozen"),
    ("5", "5 less"),
    ("5", r"5\text{i}"),
    ("5", "5xy"),
    ("1", "1e1000000000"),
    ("1e3", "1e-3"),
    (r"0.\overline{3}", "0.33333"),
    ("2\u00bd", "21/2"),
    (r"(-\infty,1)\cup(2,\infty)", r"x\le 1 or x>2"),
    ("(1,2)", "[1,2["),
    ("(-1,3]", r"\{x\mid -1\le x\le3\}"),
    ("AB", "ab"),
    ("A+b", "a+B"),
    ("n", "N"),
    (r"\Delta", r"\delta"),
    ("72", "73"),
    ("72", "12 or 72"),
    ("72", "1, 2, 72"),
    ("5", "5x"),
    ("(1,2)", "(2,1)"),
    ("0.5", "50"),
    (r"\frac{1}{3}", "0.33"),
    ("12345", "12346"),
    (r"\text{Evelyn}", "Lyneve"),
    ("C", "B"),
    ("C", "ABCD"),
    ("2", ""),
    ("", ""),
    ("3", "-3"),
    ("1/0", "1"),
    ("[1,2]", "(1,2)"),
    ("120_5", "120_6"),
    ("1011_2", "(1011)_3"),
    ("3+4i", "3 + 5 i"),
    ("3:4", r"4\colon 3"),
    (r"3\,600", "36000"),
    ("1 000 000", "1000"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("x=1,y=2", "2,1"),
    ("x=1,y=2", "x=1,y=3"),
    ("6 feet 2 inches", "6"),
    ("6 feet 2 inches", "6 inches 2 feet"),
    ("6 feet 2 inches", "75 inches"),
    ("2 hours 30 minutes", "2 hours 30 seconds"),
    ("2 hours 30 minutes", "2 days 30 minutes"),
    ("3 apples, 2 pears", "2 apples, 3 pears"),
    ("5:30 pm", "5:30 am"),
    ("5:30 pm", "5:31 pm"),
    ("5:30 pm", "17:31"),
    ("17:30", "5:30 am"),
    ("3:30", "3:31 pm"),
    ("8", "9 pm"),
    ("abc", "ABC"),
    ("abc", "abC"),
    ("xyz", "x+y+z"),
    ("xyz", "x, y, z"),
    ("xyz", "xy"),
    ("xyz", "x**y*z"),
    ("xyz", "xyzz"),
    ("xyz", r"x\cdotyz"),
    ("cat", "act"),
    ("ABC", "CBA"),
    (r"2\text{ pm}", r"2\text{ am}"),
    ("12 am", "12 pm"),
    ("x^2+y^2=1", "1"),
    ("2x+3y=6", "6"),
    ("f'(x)", "f(x)"),
    ("5", "4=5"),
    ("6", "6 feet 2 inches"),
    ("1,1,2", "1,2"),
    ("1,1,2", "1,2,2"),
    ("58,500", "500, 58"),
    (r"(-\infty,5)", "x>5"),
    (r"(-\infty,5)", r"x\le 5"),
    ("10^{-7}", "0.0"),
    (r"2.5\times 10^{-8}", "0.0"),
    (r"1.6\times 10^{-6}", "0.000002"),
    ("5372", r"5372\%"),
    (r"\sqrt{2}", r"\sqrt{2}\%"),
    ("878", "878_9"),
    ("52", "52_8"),
    ("2.28", "2.28_9"),
    (r"\frac{4}{9}", r"\frac{4}{9} \text{ feet } 3 \text{ inches}"),
    ("22", "12+10t"),
    ("0", "1 000"),
    ("60", "6 10"),
    ("56", r"5\;6"),
    ("9/2", "9 1/2"),
    (r"\ln x", r"\log_2 x"),
    (r"\ln x", r"\log_{ex} x"),
    (r"\frac{1+i}{2}", "0.5-0.5i"),
    (r"\frac{1+i}{2}", "0.5+0.4i"),
    (r"\frac{1+i}{2}", "0.5+0.5x"),
    (r"\frac{1+i}{2}", "0.5"),
    (r"24\text{ cm}^2", r"24\text{ cu. cm}"),
    (r"24\text{ cm}^2", "24 sq. in"),
    (r"24\text{ cm}", r"24\text{ sq. cm}"),
    ("24", "24 squared"),
    ("7", r"\overline{7}"),
    ("0.3", r"0.\overline{3}"),
    ("7", r"\underline{6}"),
    ("7", r"\underline{7"),
    ("14", r"2\underline{7}"),
    ("x^2", r"x^{\underline{2}}"),
    ("7", r"\cancel{7}"),
    (r"25\text{ mph}", r"25\frac{\text{miles}}{\text{minute}}"),
    ("5", "5 abc^2/d^2"),
    ("5", r"5\frac{a}{b}"),
]


@pytest.mark.sample(50)
@pytest.mark.parametrize(("answer", "response"), EQUAL)
def test_equivalent_answers_are_equal(answer, response):
    assert equal(answer, response)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("5 cm", "5 m"),
        ("5 m", "5 cm"),
        ("5 kg", "5 g"),
        ("50 km", "50 m"),
        (r"\$5", "5 cents"),
        ("3 hours", "3 minutes"),
        ("5 cm", "5 kg"),
        (r"30^\circ", "30 radians"),
        ("5%", "5 dollars"),
        (r"6\text{ cm}^2", r"6\text{ m}^2"),
        (r"\text{5 cm}", r"5\,\mathrm{m}"),
        ("5\u5398\u7c73", "5\u7c73"),
    ],
)
def test_a_hundredth_in_another_unit_is_no_percentage(answer, response):
    assert not equal(answer, response, tolerance=1e-4, percent=True)


@pytest.mark.parametrize(
    ("answer", "response"),
    [("5 cm", "5"), ("5 cm", "0.05 m"), ("5", "5 cm"), ("50%", "0.5"), (r"\$5", "5 dollars"),
     ("1 hour", "60 minutes"), (r"30^\circ", "30"), ("5 kg", "5000 g")],
)  # fmt: skip
def test_equal_amounts_score_in_every_unit_with_percentages(answer, response):
    assert equal(answer, response, tolerance=1e-4, percent=True)


@pytest.mark.sample(40)
@pytest.mark.parametrize(("answer", "response"), DIFFERENT)
def test_different_answers_are_not_equal(answer, response):
    assert not equal(answer, response)


HALF = r"\frac{1}{2}"
RELATIONS = [r"\neq", "<", ">", r"\le", r"\ge", r"\in", r"\sim", r"\mid"]
ARROWS = [
    r"\Rightarrow",
    r"\to",
    r"\iff",
    r"\implies",
    r"\mapsto",
    r"\leftarrow",
    r"\therefore",
    r"\vdash",
]
SEPARATORS = [
    r"\text{ or }",
    r"\text{ and }",
    ",",
    ";",
    "|",
    "@",
    "#",
    "&",
    r"\&",
    r"\\",
    r"\quad",
    "\n\n",
    "???",
    r"\text{, no, }",
    "or",
]
AROUND = [
    r"\neg %s",
    r"\sqrt{%s",
    "%s}9",
    "{%s",
    r"\left(%s",
    "(%s",
    r"\frac{%s",
    r"\frac{%s}{",
    "%s_9",
    "_%s",
    "^%s",
    r"\lim %s",
    r"\sum %s",
    r"\cancel{%s} 9",
    r"\begin{cases}9\\%s\end{cases}",
    r"7-(%s,3)",
    r"9 \in \{%s\}",
    r"\{%s, 9\}",
    "(%s, 9)",
    r"9 \(%s\)",
    "9 $%s$",
    "$%s$ 9",
    r"\text{the answer is $%s$ or }9",
    r"\text{the final answer is $%s$ or }9",
    r"\text{answer: $%s$, maybe } 9",
    r"\text{I guess } %s \text{ as } 9",
]


def malformed_boxes():
    """Yield boxes with the true fraction and other text that makes them wrong or unreadable."""
    between = [f" {mark} " for mark in RELATIONS + ARROWS + SEPARATORS] + ["", " "]
    for mark in between:
        yield from (f"9{mark}{HALF}", f"{HALF}{mark}9", f"x{mark}{HALF}{mark}9")
    yield from (text.replace("%s", HALF) for text in AROUND)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["math_17k_acc", "acc", "base_acc", "math_verify_reward"])
def test_a_box_that_holds_the_true_fraction_among_other_things_is_wrong(name):
    module, boxes = verifier(name), sorted(set(malformed_boxes()))
    responses = {
        box: f"<think>a</think><answer>\\boxed{{{box}}}</answer>"
        for box in boxes
        if box != HALF + "}9"  # this box is right
    }
    assert [
        box for box, response in responses.items() if module.score(response, HALF) > module.WRONG
    ] == []
    assert (
        len(boxes) > 110
        and module.score(f"<think>a</think><answer>\\boxed{{{HALF}}}</answer>", "0.5") == 1.0
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("truth", ["7", r"\sqrt{2}", r"(\frac12,\frac23)", r"\frac{3}{4}", "x^2+1"])
def test_another_truth_does_not_match_a_malformed_box(truth):
    # 7_9 is a numeral of base 9 with the value 7.
    boxes = sorted({box.replace(HALF, truth) for box in malformed_boxes() if "_9" not in box})
    assert [box for box in boxes if equal(truth, box)] == []


def test_plain_integers_are_compared_in_microseconds():
    score = verifier("acc").score
    start = time.process_time()
    for number in range(2000):
        score(rf"\boxed{{{number}}}", "132")
    assert (time.process_time() - start) / 2000 < 1e-3  # a parse takes several milliseconds


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "response",
    [
        "</think><answer>" * 20000,
        "<think>" + "</think> " * 50000,
        "\\boxed{" * 50000,
        "<think>" + " \n" * 100000,
    ],
)
def test_hostile_repetition_takes_linear_time(response):
    start = time.process_time()
    for name in {*registry.names(PACKAGE)} - NEEDS_A_SANDBOX - NEEDS_A_PACKAGE:
        verifier(name).score(response, "1", **OPTIONS.get(name, {}))
        verifier(name).score("<think>" + response, "1", **OPTIONS.get(name, {}))
    assert time.process_time() - start < 10  # quadratic time would be minutes


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "piece", [" ", "x<", "1,", "[", "{", "\\text{a}", "5 or ", "²", "\\%", "E9"]
)
def test_hostile_answers_are_compared_in_milliseconds(piece):
    start = time.process_time()
    for text in (piece * (4000 // len(piece)), "1" + piece * 1000 + "y", "x<" + piece * 100 + "<2"):
        unify(text[:4096])
        intervals(text[:4096])
        amount(text[:4096])
        is_qualified(text[:4096])
    assert time.process_time() - start < 2


UNBOUNDED = [
    "10^{10^{10}}",
    "10^{-10^{10}}",
    "9^{9^{9^{9}}}",
    "2^{100000000}",
    "(10^6)!",
    "10^5!!",
    r"\Gamma(10^9)",
    r"\binom{1000000000}{500000000}",
    r"\binom{\binom{1000}{500}}{\binom{100}{50}}",
    r"\gcd(10^{10^8}, 3)",
    r"\prod_{k=1}^{10^7} k",
    r"\sum_{k=1}^{10^9} 2^k",
    r"\sin(10^{10^9})",
    r"\log(10^{10^{10}})",
    r"\frac{10^{10^9}}{3}",
    "e^{10^{10}}",
    "1.5^{123456789}",
    "0.1^{10^9}",
    "(1+x)^{100000}",
    "(1+x+y)^{3000}",
    "x^{1000000000}-1",
    "9" * 4000 + "^{9999}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000000}",
    r"\operatorname{eye}(1000000000)",
    r"\operatorname{zeros}(100000, 100000)",
    r"(1, 10^{10^{10}})",
    r"x > 10^{10^{10}}",
    r"10^{10^{10}}\%",
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("response", UNBOUNDED)
def test_a_value_without_bounds_is_not_computed(response):
    start = time.process_time()
    assert not equal("5.5", response, tolerance=1e-4, percent=True)
    assert not equal(response, "5.5", tolerance=1e-4, percent=True)
    assert equal(response, f"${response}$")
    assert not are_equal(formula("x"), boxed_formula(rf"\boxed{{{response}}}"))
    assert time.process_time() - start < 10


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("2^{2024}-1", "2^{2023} \\cdot 2 - 1"),
        ("100!", "100 \\cdot 99!"),
        (r"\binom{1000}{500}", r"\binom{1000}{500}+0"),
        (r"\binom{10^9}{2}", "499999999500000000"),
        (r"\sum_{k=1}^{10^6} k", "500000500000"),
        (r"\prod_{k=1}^{10} k", "3628800"),
        ("3^{2^{10}}", "9^{512}"),
        ("(a+b)^{10}", "(b+a)^{10}"),
        ("2^{n+1}", r"2 \cdot 2^n"),
        (r"\gcd(12, 18)", "6"),
        ("10^{-300}", r"\frac{1}{10^{300}}"),
        ("(-1)^{10^{9}}", "1"),
    ],
)
def test_large_values_within_the_bounds_are_compared(answer, response):
    assert equal(answer, response)


def test_a_comparison_that_takes_long_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(equality, "MAX_SECONDS", 0.05)
    with pytest.raises(TimeLimitError):
        equal("5.5", r"\sum_{k=1}^{10^9} \frac{1}{k^3+k+1}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(10))
def test_real_gsm8k_answers_score_right_and_neighboring_numbers_wrong(part):
    rows = [
        json.loads(line)
        for line in shared_data("math", "gsm8k_train.jsonl").read_text().splitlines()
    ]
    acc, base_acc = verifier("acc").score, verifier("base_acc").score
    for row in rows[part::10]:
        number = row["answer"].rpartition("#### ")[2]
        boxed = f"\\boxed{{{number.replace(',', '')}}}"
        response = f"<think> {row['answer']} </think><answer> {boxed} </answer>"
        wrong = (
            f"<think> x </think><answer> \\boxed{{{int(number.replace(',', '')) + 1}}} </answer>"
        )
        assert acc(response, row["answer"]) == base_acc(response, number) == 1.0
        assert acc(wrong, row["answer"]) == -0.5
        assert base_acc(wrong, number) == 0.0
    assert len(rows) == 7473


@pytest.mark.full
@pytest.mark.slow
def test_real_solutions_of_math_500_score_right():
    rows = [
        json.loads(line) for line in shared_data("math", "math500.jsonl").read_text().splitlines()
    ]
    score = verifier("math_17k_acc").score
    missed = [row["answer"] for row in rows if score(row["solution"], row["answer"]) != 1.0]
    assert missed == []
    shifted = [
        rows[i - 1]["answer"]
        for i, row in enumerate(rows)
        if score(rows[i - 1]["solution"], row["answer"]) == 1.0
    ]
    same = sum(rows[i - 1]["answer"] == row["answer"] for i, row in enumerate(rows))
    assert len(shifted) <= same + 1, shifted


@pytest.mark.parametrize(
    ("text", "right", "counting"), [("one two", 0.0, 1.0), ("one two one", 1.0, 0.0)]
)
def test_ifeval_counts_the_keyword_or_as_roll_all_words(text, right, counting):
    truth = json.dumps({"func_name": "verify_keyword_frequency", "word": "one", "N": 2})
    module = verifier("ifeval")
    assert module.score(text, truth) == right
    assert module.score(text, truth, counts_all_words=True) == counting


WRONG_REMAINDERS = (
    "{right} \\approx {wrong}", "{wrong} = {right}", "{wrong} \\equiv {right}", "{right}≈{wrong}",
    "x = {wrong} = {right}", "{right} \\simeq {wrong}", "{wrong} == {right}",
    "{right} \\bmod {wrong}", "{right} \\text{{ instead of }} {wrong}", "{right} \\to {wrong}",
    "{right} \\leq {wrong}", "{right} \\ne {wrong}", "{right} \\pm {wrong}", "{right}_{{{wrong}}}",
    "{right} \\text{{ or }} {wrong}", "{right} ; {wrong}", "{wrong} | {right}",
    "{right}\\text{{{wrong}}}", "{right}\\mathbf{{{wrong}}}", "\\textbf{{{wrong}}}{right}",
    "{right} \\text{{ or {wrong}}}", "{right} \\text{{ divided by {wrong}}}",
    "{right}\\text{{\\textit{{{wrong}}}}}", "\\boxed{{{right}}}{wrong}",
    "{wrong}\\boxed{{{right}}}", "{right}\\text{{x}}", "{right}\\mathrm{{n}}",
)  # fmt: skip


@pytest.mark.sample(9)
@pytest.mark.parametrize("form", WRONG_REMAINDERS)
def test_a_wrong_remainder_beside_the_right_value_never_scores(form):
    for right, wrong in (
        ("5", "9"),
        ("5", r"\sqrt{7}"),
        (r"\sqrt{2}", "9"),
        (r"\frac{1}{2}", r"\frac{3}{4}"),
        ("3.5", "7.25"),
        (r"\pi", "{9}"),
        ("5", "{9}"),
    ):
        assert not equal(right, form.format(right=right, wrong=wrong)), (right, wrong)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("5", "x = 5"),
        ("5", "5 = 10/2"),
        ("5", r"x = \frac{10}{2} = 5"),
        ("5", "a + b = 5"),
        ("5", "P(X=2) = 5"),
        ("5", r"x \approx 5"),
        (r"\sqrt{2}", r"x = \sqrt{2} \approx 1.414"),
        ("x+1", "f(x) = x+1"),
        ("x^2-1", "(x-1)(x+1) = x^2-1"),
        ("x^2+y^2=1", "x^2+y^2=1"),
        ("35", "35_{10}"),
        ("5", r"x = \text{5}"),
        ("5/2", r"\frac{\mathbf{5}}{2}"),
        ("5", r"\mathbf{5} \text{ cm}"),
        ("9 m^2", r"9 \text{ m}^2"),
        ("5", r"x = \boxed{5}"),
    ],
)
def test_a_true_chain_of_equalities_scores(answer, response):
    assert equal(answer, response)


@pytest.mark.parametrize("response", ["9 = x+1", r"x+1 \approx 9", "x+2 = x+1"])
def test_a_wrong_side_beside_an_expression_never_scores(response):
    assert not equal("x+1", response)
