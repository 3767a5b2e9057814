"""The syncer's values: the global model, its arithmetic, and merge shards."""
