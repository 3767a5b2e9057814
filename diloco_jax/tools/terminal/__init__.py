"""Texts about a run: its picture on a terminal, a line for each change elsewhere, `status`, and the closing lines."""
