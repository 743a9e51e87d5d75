"""Evaluation of checkpoints with the rewards of training: `msrl eval`."""
