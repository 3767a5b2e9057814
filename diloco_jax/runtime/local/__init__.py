"""A whole run on this machine: its processes, their controller, and the baseline."""
