"""Images on training ranks: pixels, the vision tower, and its features among embeddings."""
