"""The loop that drives a learner's machine, its effects and its tape."""
