"""The page of runs in a browser, and runs beside each other: docs/page.md."""
