"""The rule verifiers, one in each file. A file has

- `score(response: str, answer: str, *, options...) -> float`, its main function: `response` is the decoded text without special
  tokens, `answer` the ground truth of the row; keyword-only parameters with a default are the options of the source in the
  configuration, checked against their annotations; a keyword-only `extra` without one gets the row's further columns, by name;
- `WRONG: float`, the score of a wrong response, which is also that of one whose verification timed out, crashed or raised;
- `NEEDS_ANSWER: bool`, whether a row without a ground truth cannot be scored;
- where it applies, `answer_refusal(answer, **options) -> str | None`, why no response could be scored by this ground truth: asked of
  every row before the run;
- where it applies, `refusal(**options) -> str | None`, why these options, or this machine, cannot be used: asked before the run.
"""

# Words that users try, with the verifiers of that meaning. Errors about unknown names suggest them.
_MATH = ("math_verify_reward", "math_17k_acc", "acc")
SENSES = {
    "math": _MATH,
    "math_verify": _MATH,
    "math_equal": _MATH,
    "boxed": _MATH,
    "gsm8k": _MATH,
    "aime": _MATH,
    "accuracy": _MATH,
    "exact": ("exact_match",),
    "string_match": ("exact_match",),
    "em": ("exact_match",),
    "choice": ("multiple_choice",),
    "mcq": ("multiple_choice",),
    "mmlu": ("multiple_choice",),
    "regex": ("regex_answer", "regex_match"),
    "think": ("format", "strict_format"),
    "coding": ("code",),
    "python": ("code",),
}
