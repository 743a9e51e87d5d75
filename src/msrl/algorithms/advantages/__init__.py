"""From rewards to advantages: each file is an `algo.advantage.estimator` of its name.

Its main function is `advantages(rewards: TokenRewards, *, ...) -> [N]`, one float64 number for every token of every response. `eps` and
`gamma`, where it names them without a default, are those of `algo.advantage`; parameters with a default are its own, set by `algo.options`.
A module with `COMPARES_GROUPS = True` needs at least two completions of a prompt.
"""
