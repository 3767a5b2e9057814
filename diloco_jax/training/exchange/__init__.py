"""The exchange of fragments between an island's devices and its host."""
