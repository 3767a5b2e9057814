"""The check that the simulator is true: a real chaos run beside the same faults on virtual time."""
