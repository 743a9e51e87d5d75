"""Import of MindSpeed-LLM scripts, data options and RL files."""
