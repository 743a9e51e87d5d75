"""Preference losses. Each file defines the `algo.preference.loss` of its name.

Its main function is `preference_loss(pairs: Pairs, *, beta, ...) -> PairLosses`, or, with
`DATA = "labeled"`, `preference_loss(labeled: LabeledAnswers, *, beta, ...) -> LabeledLosses`. It
returns the loss of every pair or answer; their weighted mean over an update is minimized. `beta`
receives `algo.preference.beta`, whose default is the constant `BETA`. Parameters with a default are
options of the loss, set in `algo.preference.options`. A module with `NEEDS_REFERENCE = True` reads
log-probabilities of the reference model. One with `READS_MARGINS = True` reads the margins of the
data. `OPTION_RANGES` maps options to a lower bound, which is excluded, and an upper bound, which is
included, or None.
"""
