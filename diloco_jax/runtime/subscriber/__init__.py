"""A process that receives the global model of a run and gives nothing."""
