"""Samples for training and evaluation: where they come from (corpus.py, own.py), and their global order (order.py)."""
