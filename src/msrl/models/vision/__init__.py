"""Vision towers of vision-language models."""
