"""Files of rows: which ones an input names, their splits, and readers of every format."""
