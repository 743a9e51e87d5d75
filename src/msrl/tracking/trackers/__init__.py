"""Tracker plugins: one module each, with `open_tracker(run_dir, *, resumed_step=None) -> Tracker`."""
