"""MATH-500: 500 problems of the MATH test set (arXiv:2305.20050, arXiv:2206.14858)."""

TASK = "minerva_math500"
FOLDER = "minerva_math"
COLUMNS = ("problem", "solution")
METRIC = "math_verify,none"
GENERATES = True
