"""Weight rules of a decoder: one module per kind of mixer or block, and `decoder` joins them."""
