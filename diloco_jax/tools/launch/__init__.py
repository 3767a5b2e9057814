"""Manifests and scripts that start a run on Google Cloud."""
