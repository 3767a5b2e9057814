"""The lines that processes of a run print: their form, and a handler for programs that configured no logging."""

import json
import logging
import os
from datetime import UTC, datetime

FORMAT = "%(asctime)s %(message)s"
PACKAGE = "diloco_jax"


class JsonLines(logging.Formatter):
    """Log records as lines of JSON with a severity, for Google Cloud's logging and similar readers."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage() + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")
        when = datetime.fromtimestamp(record.created, UTC).isoformat()
        return json.dumps({"severity": record.levelname, "time": when, "logger": record.name, "message": text})


def formatter() -> logging.Formatter:
    """Return the form of the lines: text, or JSON if DILOCO_LOG is json."""
    return JsonLines() if os.environ.get("DILOCO_LOG") == "json" else logging.Formatter(FORMAT)


def show_lines() -> None:
    """Print this package's lines to stderr, unless the program has configured its own logging.

    If the program configures the root logger later, that logger prints the lines instead.
    """
    ours, root = logging.getLogger(PACKAGE), logging.getLogger()
    if ours.handlers or root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    handler.addFilter(lambda _: not root.handlers)
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
