"""Rows of the input: their formats, preference data, and handlers of users."""
