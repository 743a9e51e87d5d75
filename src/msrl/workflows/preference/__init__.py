"""Training on preference data (`msrl train-dpo`)."""
