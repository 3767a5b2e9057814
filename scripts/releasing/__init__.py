"""Releases: checks of the repository, a trial of the built wheel, and an upgrade of a run while it trains."""
