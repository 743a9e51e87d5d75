"""C-Eval: Chinese multiple-choice questions about 52 subjects, by likelihood (arXiv:2305.08322)."""

TASK = "ceval-valid"
FOLDER = "ceval"
COLUMNS = ("question", "A", "B", "C", "D", "answer")
METRIC = "acc,none"
SHOTS = 5
