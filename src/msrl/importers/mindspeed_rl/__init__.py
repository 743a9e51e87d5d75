"""Import of MindSpeed-RL configuration files."""
