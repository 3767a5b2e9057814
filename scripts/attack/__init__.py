"""Attacks on a run: hostile learners against a real syncer, mistaken commands and damage against real run folders."""
