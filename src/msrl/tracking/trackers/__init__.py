"""Tracker plugins with `open_tracker(run_dir, *, resumed_step, ...)` and `check(options)`."""
