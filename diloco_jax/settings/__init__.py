"""The run's settings and their text form."""
