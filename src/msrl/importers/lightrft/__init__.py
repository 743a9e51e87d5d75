"""Import of LightRFT command lines."""
