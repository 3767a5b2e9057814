"""Decisions of the protocol as deterministic machines: standard library only, no clock, no sockets, no threads."""
