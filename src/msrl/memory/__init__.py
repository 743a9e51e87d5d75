"""Estimates of memory per device and of floating-point operations."""
