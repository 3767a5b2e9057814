"""The timeline of a run for viewers of traces, and what a run reads."""
