"""Import of public weights into a config, and export of a run's model to formats of other libraries."""
