"""Certificates, tokens and permissions of connections."""
