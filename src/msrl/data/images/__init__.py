"""Images of rows: marks in texts, files and other sources, tokens, and files of a dataset."""
