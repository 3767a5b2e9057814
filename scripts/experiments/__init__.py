"""The claims of the paper as experiments that one command repeats."""
