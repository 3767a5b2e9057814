"""Compilation of a config's programs for TPU slices, without a TPU."""
