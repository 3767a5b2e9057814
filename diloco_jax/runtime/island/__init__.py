"""The host processes of one island."""
