"""Compilation of a config's programs for TPU slices on a machine without a TPU."""
