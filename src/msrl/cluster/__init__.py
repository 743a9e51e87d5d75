"""Where workers run: the plan (pure), Ray nodes started and stopped, and the session of a run."""
