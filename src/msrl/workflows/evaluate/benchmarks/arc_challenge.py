"""ARC-Challenge: harder questions of school science, by likelihood (arXiv:1803.05457)."""

TASK = "arc_challenge"
FOLDER = "arc"
COLUMNS = ("question", "choices", "answerKey")
METRIC = "acc_norm,none"
