"""IFEval: prompts with instructions that a program can check (arXiv:2311.07911)."""

TASK = "ifeval"
FOLDER = "ifeval"
COLUMNS = ("key", "prompt", "instruction_id_list", "kwargs")
METRIC = "prompt_level_strict_acc,none"
GENERATES = True
NLTK_DATA = "tokenizers/punkt_tab"
