"""Verification of conversions: bits, logits, layer by layer."""
