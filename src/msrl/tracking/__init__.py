"""Output of a run: progress, metrics, trackers, plots, the run folder and the final report."""
