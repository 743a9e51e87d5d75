"""Benchmarks of msrl and peers on the same inputs: `nox -s bench -- [NAME...]`; see __main__.py."""
