"""Charts as SVG text, and what a page around them needs. Standard library only."""
