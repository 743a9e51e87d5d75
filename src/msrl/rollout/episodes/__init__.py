"""Episodes: several turns of the policy with an environment, token by token."""
