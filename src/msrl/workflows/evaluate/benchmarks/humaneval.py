"""HumanEval: Python functions that must pass the tests of the row (arXiv:2107.03374)."""

TASK = "humaneval"
CHAT_TASK = "humaneval_instruct"
FOLDER = "humaneval"
COLUMNS = ("prompt", "test", "entry_point")
METRIC = "pass@1,create_test"
GENERATES = True
RUNS_CODE = True
