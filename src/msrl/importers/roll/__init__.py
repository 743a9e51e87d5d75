"""ROLL's configuration files."""
