"""The twin of a real run: the same faults on virtual time, to see how true the simulator is."""
