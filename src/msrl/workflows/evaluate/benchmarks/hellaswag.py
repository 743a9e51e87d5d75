"""HellaSwag: the likeliest of four ends of a text (arXiv:1905.07830)."""

TASK = "hellaswag"
FOLDER = "hellaswag"
COLUMNS = ("ctx_a", "ctx_b", "activity_label", "endings", "label")
METRIC = "acc_norm,none"
