"""A run from its tapes: its replay, the audit of its samples, and its timeline."""
