"""Weight rules of the layers of a decoder, one module per kind of mixer or block."""
