"""Samplers of a curriculum. Each file defines the `data.curriculum.sampler` of its name.

Its main function is `pools(success: Floats, *, ...) -> tuple[Pool, ...]`. `success` has the success
rate of every prompt, NaN before its first measurement. Parameters with a default are options of the
sampler, set in `data.curriculum.options`. `OPTION_RANGES` maps options to a lower bound, which is
excluded, and an upper bound, which is included, or None.

`base.draw` draws prompts from the pools.
"""
