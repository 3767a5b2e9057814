"""Simulated goodput of clusters whose chips fail."""
