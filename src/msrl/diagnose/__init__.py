"""Causes of a mismatch between sampling and training: evidence, checks and verdict.

Nothing here starts an engine or a rank: `msrl.workflows.diagnose` collects the evidence.
"""
