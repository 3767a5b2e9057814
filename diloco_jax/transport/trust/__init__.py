"""Certificates, tokens, and who may speak to whom."""
