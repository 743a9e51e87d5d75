"""Reward models in a separate process or on the training ranks."""
