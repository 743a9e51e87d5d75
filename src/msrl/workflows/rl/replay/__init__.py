"""Training from recorded rollouts, without engines."""
