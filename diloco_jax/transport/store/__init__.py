"""Objects in a bucket: the store itself, their names, their encryption, and who leads the run."""
