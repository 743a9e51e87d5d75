"""lm-evaluation-harness 0.4.13 on an engine of msrl and on rows of a local folder."""
