"""AGIEval: questions of admission and qualification exams (arXiv:2304.06364)."""

TASK = "agieval"
FOLDER = "agieval"
COLUMNS = ("query",)
METRIC = "acc,none"
