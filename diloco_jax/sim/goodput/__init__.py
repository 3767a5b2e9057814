"""Goodput of clusters whose chips fail, by simulation."""
