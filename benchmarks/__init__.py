"""Ours beside the peers, in turn, on the same inputs: `nox -s bench -- [NAME...]`. See __main__.py."""
