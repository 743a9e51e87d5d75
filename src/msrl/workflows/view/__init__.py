"""`msrl view`: pages in a browser that show runs from their curves down to single tokens."""
