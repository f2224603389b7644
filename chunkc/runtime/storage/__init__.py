"""Where chunks stand, and reading and writing parameters in them."""
