"""`diloco stage`: what a run must show before it gets more sites."""
