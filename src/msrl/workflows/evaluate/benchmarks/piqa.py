"""PIQA: the likelier of two ways to reach a goal (arXiv:1911.11641)."""

TASK = "piqa"
FOLDER = "piqa"
COLUMNS = ("goal", "sol1", "sol2", "label")
METRIC = "acc_norm,none"
