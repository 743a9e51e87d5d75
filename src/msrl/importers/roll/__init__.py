"""Import of ROLL configuration files."""
