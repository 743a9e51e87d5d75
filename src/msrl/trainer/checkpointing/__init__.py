"""Saving and resuming of a training."""
