"""The connections among the hosts of one island."""
