"""Placement of workers on devices, lifecycle of Ray nodes, and a run's connection to Ray."""
