"""Reinforcement learning (`msrl train-grpo`)."""
