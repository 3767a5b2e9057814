"""The figures of a run and of its islands: one table that every outlet reads."""
