"""The connections between the slices of one island."""
