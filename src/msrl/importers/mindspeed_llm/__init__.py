"""MindSpeed-LLM's scripts, data options and RL files."""
