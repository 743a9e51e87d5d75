"""GSM8K: word problems of grade-school mathematics (arXiv:2110.14168)."""

TASK = "gsm8k"
FOLDER = "gsm8k"
COLUMNS = ("question", "answer")
METRIC = "exact_match,flexible-extract"
GENERATES = True
