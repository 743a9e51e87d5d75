"""Child processes: their ends, messages, limits and templates."""
