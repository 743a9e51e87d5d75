"""MindSpeed-RL's configuration files."""
