"""Rule-based verifiers, one per file.

A file defines:

- `score(response: str, answer: str, *, options...) -> float`, its main function. `response` is the
  decoded text without special tokens and `answer` the ground truth of the row. Keyword-only
  parameters with a default are the options of the source in the configuration, checked against
  their annotations. A keyword-only `extra` without a default receives the extra columns by name.
- `WRONG: float`, the score of a wrong response, and of one whose verification timed out, crashed or
  raised.
- `NEEDS_ANSWER: bool`, True if a row without a ground truth cannot be scored.
- Optionally `answer_refusal(answer, **options) -> str | None`, the reason why a ground truth cannot
  be used. It is called for every row before the run.
- Optionally `refusal(**options) -> str | None`, the reason why these options or this machine cannot
  be used. It is called before the run.
- Optionally `prepare()`, which each worker process calls before its first call, for imports that
  take long.
- Optionally `explain(response, answer, **options) -> str`, one or two sentences on what the score
  is based on, for `msrl view`. It must be cheap: it is called for every response, in this process.
"""

# Names that users may try, with the verifiers to suggest in errors about unknown names.
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
    "reasoning": ("reasoning_gym",),
}
