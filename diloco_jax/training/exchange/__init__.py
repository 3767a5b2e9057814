"""Ways of a fragment between an island's devices and its host."""
