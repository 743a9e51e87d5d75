"""Divergences of distillation. Each file defines the `algo.distill.divergence` of its name.

Its main function is `divergence(student, teacher, ...) -> (terms, slopes)` of the log-probabilities
of both models, [R, V] for R positions and V tokens of the vocabulary. The sum of the terms over the
vocabulary is the divergence. The slopes are its derivatives by the student's log-probabilities, up
to a multiple of the student's probabilities, which changes no gradient of logits. Both functions
are elementwise, so that ranks that share a vocabulary only add up their sums. Keyword-only
parameters are options of the divergence, set in `algo.distill.options`.
"""
