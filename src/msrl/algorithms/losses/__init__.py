"""Policy losses: each file is an `algo.policy_loss` of its name.

Its main function is `policy_loss(tokens: PolicyTokens, *, ...) -> TokenLosses`, the loss of every token; how tokens become one number is
the aggregation's business. `clip_low`, `clip_high` and `dual`, where it names them without a default, are those of `algo.clip`; parameters
with a default are its own, set by `algo.options`. A module with `OWN_RATIO = True` defines its ratio itself and takes no `algo.ratio`.
A module with `ONE_ADVANTAGE = True` is defined only where all tokens of a sequence have the same advantage and the same mismatch weight.
Positive factors of the advantages are factors of what a loss makes of them: sample weights multiply the advantages. Mismatch corrections
multiply the losses of the tokens.
"""
