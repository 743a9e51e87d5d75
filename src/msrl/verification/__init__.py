"""Checks that a conversion is right: bits, logits, layer by layer."""
