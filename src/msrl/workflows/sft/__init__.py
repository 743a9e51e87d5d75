"""Supervised fine-tuning (`msrl train-sft`)."""
