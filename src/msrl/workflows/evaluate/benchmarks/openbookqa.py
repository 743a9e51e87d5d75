"""OpenBookQA: multiple-choice questions of elementary science (arXiv:1809.02789)."""

TASK = "openbookqa"
FOLDER = "openbookqa"
COLUMNS = ("question_stem", "choices", "answerKey")
METRIC = "acc_norm,none"
