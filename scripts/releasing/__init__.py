"""A release: what must hold, what is built and tried from an empty environment, and an upgrade while a run trains."""
