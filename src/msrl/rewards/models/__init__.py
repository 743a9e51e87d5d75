"""Reward models: in a process of their own or on the training ranks."""
