"""BoolQ: questions about a passage, answered by the likelier of no and yes (arXiv:1905.10044)."""

TASK = "boolq"
FOLDER = "super_glue/boolq"
COLUMNS = ("passage", "question", "label")
METRIC = "acc,none"
