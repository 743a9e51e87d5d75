"""Advantage estimators. Each file defines the `algo.advantage.estimator` of its name.

Its main function is `advantages(rewards: TokenRewards, *, ...) -> [N]` and returns one float64
value for every token of every response. Parameters `eps` and `gamma` without a default receive the
values of `algo.advantage`. Parameters with a default are options of the estimator, set in
`algo.options`. A module with `NEEDS_DISTRIBUTION = True` also receives `logprobs` and
`squared_probabilities` of the policy that sampled. A module with `NEEDS_GREEDY = True` receives
`greedy_rewards`, the rewards of one greedy response to each prompt. A module with
`COMPARES_GROUPS = True` needs at least two completions of a prompt.
"""
