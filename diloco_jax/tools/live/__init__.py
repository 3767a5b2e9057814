"""The live view of a run: a picture on a terminal, a line for each change elsewhere, and the text of `status`."""
