"""CMMLU: Chinese multiple-choice questions about 67 subjects, by likelihood (arXiv:2306.09212)."""

TASK = "cmmlu"
FOLDER = "cmmlu"
COLUMNS = ("Question", "A", "B", "C", "D", "Answer")
METRIC = "acc,none"
SHOTS = 5
