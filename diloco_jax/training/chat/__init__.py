"""Conversations as data: the text of a chat template, the tokens that are trained on, and whole samples."""
