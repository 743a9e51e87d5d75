"""Values that a run derives from its configuration once."""
