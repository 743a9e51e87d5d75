"""BIG-Bench Hard: 27 tasks with three solved examples each (arXiv:2210.09261)."""

TASK = "bbh_cot_fewshot"
FOLDER = "bbh/cot_fewshot"
COLUMNS = ("input", "target")
METRIC = "exact_match,get-answer"
GENERATES = True
