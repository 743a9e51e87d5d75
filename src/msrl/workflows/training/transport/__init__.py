"""Calls to the workers of a run: local processes and Ray actors behind one interface."""
