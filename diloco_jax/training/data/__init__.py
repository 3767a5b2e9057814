"""Samples for training and evaluation: their sources (corpus.py, own.py) and their global order (order.py)."""
