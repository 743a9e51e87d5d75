"""LightRFT's command lines."""
