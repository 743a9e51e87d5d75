"""Log-probabilities and losses of packed micro-batches."""
