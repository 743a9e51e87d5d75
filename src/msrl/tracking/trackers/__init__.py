"""Tracker plugins: modules with `open_tracker(run_dir, *, resumed_step=None)` and `check()`."""
