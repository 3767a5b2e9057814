"""The `diloco` command: its parser, its words, and a thin module for each group of subcommands."""
