"""Episodes in training, evaluation and generation: their setup and metrics."""
