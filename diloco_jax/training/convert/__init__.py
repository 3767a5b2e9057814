"""Conversion of public models: their configs, their tensors and their files."""
