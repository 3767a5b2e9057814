"""Outlets of a run for people: trackers such as TensorBoard, and callbacks of the user's own."""
