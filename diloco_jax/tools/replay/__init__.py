"""A run trained again from its tapes, and the audit of its samples."""
