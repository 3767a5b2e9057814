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
    """Print this package's lines to stderr, or by the handlers of the root logger while it has some.

    Imports such as Orbax's give the root logger a handler and leave its level at WARNING, which no program chose. A
    program that has set another level, or given the package's logger a handler, keeps what it chose.
    """
    ours, root = logging.getLogger(PACKAGE), logging.getLogger()
    if ours.handlers:
        return
    if ours.getEffectiveLevel() == root.level == logging.WARNING:
        ours.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    handler.addFilter(lambda _: not root.handlers)
    ours.addHandler(handler)
