"""Asynchronous rollouts: admission and buffering of groups under a strict staleness bound."""
