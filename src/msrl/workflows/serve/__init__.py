"""Text generation (`msrl generate` and `msrl chat`)."""
