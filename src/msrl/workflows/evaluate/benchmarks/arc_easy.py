"""ARC-Easy: multiple-choice questions of school science, by likelihood (arXiv:1803.05457)."""

TASK = "arc_easy"
FOLDER = "arc"
COLUMNS = ("question", "choices", "answerKey")
METRIC = "acc_norm,none"
