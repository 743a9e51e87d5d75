"""Files of rollouts and evaluations of a run, written while the run continues."""
