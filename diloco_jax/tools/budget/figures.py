"""Formatting of sizes, times and counts for people, with three digits and a unit."""


def size(num_bytes: float) -> str:
    """Format a number of bytes, such as 1.23 GB."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a time, such as 23.4 min."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def count(number: float) -> str:
    """Format a number of parameters, such as 1.23 B."""
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"
