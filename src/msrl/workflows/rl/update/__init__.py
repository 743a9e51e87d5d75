"""Stages of a GRPO step from scored groups to new weights, one file each.

Arrays of the groups (`algorithms/rollout_arrays.py`), values of tokens (`values.py`), advantages
(`advantages.py`), batches (`batches.py`) and updates (`updater.py`).
"""
