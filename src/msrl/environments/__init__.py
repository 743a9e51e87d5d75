"""Environments of episodes: their interface, the processes that run them, and tool formats."""
