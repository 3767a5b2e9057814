"""The live view of a run: a picture on a terminal, lines of what changes elsewhere, keys, and the words of `status`."""
