"""Checkpoint conversion (`msrl convert-ckpt`)."""
