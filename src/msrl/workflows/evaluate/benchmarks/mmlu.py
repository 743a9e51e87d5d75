"""MMLU: multiple-choice questions about 57 subjects, by likelihood (arXiv:2009.03300)."""

TASK = "mmlu"
FOLDER = "mmlu/default"
COLUMNS = ("question", "choices", "answer")
METRIC = "acc,none"
SHOTS = 5
