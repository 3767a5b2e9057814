"""Forecasts of the links, chips and hosts that a config needs, and the data that it reads."""
