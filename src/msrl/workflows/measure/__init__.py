"""`msrl doctor --measure`: the speeds of this machine as a profile for `msrl plan`."""
