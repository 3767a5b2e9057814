"""Outlets of a run for people: trackers such as TensorBoard, and your own callbacks."""
