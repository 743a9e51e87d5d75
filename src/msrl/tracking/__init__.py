"""What a run writes about itself: progress, metrics, trackers, plots, the run folder and the report at its end."""
