"""Import of the data of MindSpeed-MM, and of the freeze keys of its model files."""
