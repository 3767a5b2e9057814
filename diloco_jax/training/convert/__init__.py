"""Models of other libraries, and their files."""
