"""Benchmarks of msrl and its peers on the same inputs; see `__main__.py`."""
