"""Notes which test reached which place: one line per pair, also from processes that a test started."""

import os
import sys

# What a module computes while it is imported is for all tests, and not only for the first that imports it.
ALL = "all tests"
_IMPORT = "<frozen importlib._bootstrap>"

_noted: set[tuple[int, str]] = set()


def note(number: int) -> None:
    """Append a place and the test that runs now to the file that MUTANT_NOTES names; a second time costs nothing."""
    # Pytest sets this variable to "file::test[case] (call)", and child processes inherit it.
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) in _noted or (number, ALL) in _noted or not test:
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    test = test if frame.f_back is None else ALL
    _noted.add((number, test))
    with open(os.environ["MUTANT_NOTES"], "a") as file:
        file.write(f"{number}\t{test}\n")
