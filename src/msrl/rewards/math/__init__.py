"""Comparison and extraction of mathematical answers."""
