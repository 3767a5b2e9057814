"""The live view, and the page that a finished run leaves."""
