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
