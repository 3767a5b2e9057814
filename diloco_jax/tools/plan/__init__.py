"""The forecast of what a config asks of links, chips and hosts."""
