"""LAMBADA: the last word of a passage, if it is the likeliest one (arXiv:1606.06031)."""

TASK = "lambada_openai"
FOLDER = "lambada"
COLUMNS = ("text",)
METRIC = "acc,none"
