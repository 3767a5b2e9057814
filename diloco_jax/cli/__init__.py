"""The `diloco` command: its parser, the list of its commands, and a thin module for each group of them."""
