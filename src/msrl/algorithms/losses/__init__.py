"""Policy losses. Each file defines the `algo.policy_loss` of its name.

Its main function is `policy_loss(tokens: PolicyTokens, *, ...) -> TokenLosses` and returns the loss
of every token; `aggregate.py` reduces them to one number. Parameters `clip_low`, `clip_high` and
`dual` without a default receive the values of `algo.clip`. Parameters with a default are options of
the loss, set in `algo.options`. A module with `OWN_RATIO = True` defines its own ratio and takes no
`algo.ratio`; with `NO_RATIO = True` it has none, so it does not correct for the policy that
sampled. A module with `ONE_ADVANTAGE = True` needs one advantage and one mismatch weight per
sequence. A loss must be positively homogeneous in the advantages, because sample weights multiply
them. A module with `SELECTS_TOKENS = True` is not, since it selects tokens of a micro-batch by
their advantages. Mismatch corrections multiply the token losses. `OPTION_RANGES` maps options to a
lower bound, which is excluded, and an upper bound, which is included, or None.
"""
