"""Workflows of the commands: the only place where the packages below meet."""
