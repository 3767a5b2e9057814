"""Real runs under faults, with a verdict on how the run recovered from each fault."""
