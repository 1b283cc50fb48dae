"""The log of a server under test: one JSON line per record, warnings of Python among them."""

from __future__ import annotations

import json
import logging

logging.captureWarnings(True)


class Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        text = record.getMessage()
        return json.dumps(
            {"logger": record.name, "level": record.levelname, "text": text, "error": error}
        )
