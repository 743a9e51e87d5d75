"""Rollouts that are generated and scored while the policy trains."""
