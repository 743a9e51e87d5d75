"""Import of verl's configurations and launch scripts."""
