"""The syncer's values: the global model and its arithmetic."""
