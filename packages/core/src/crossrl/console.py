"""Lines for people: a job's processes mark them, `crossrl run` shows the marked ones and files the rest."""

from __future__ import annotations

import logging
import sys

MARK = "[crossrl] "


class _MarkedLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(MARK + line for line in super().format(record).splitlines())


def mark_logs() -> None:
    """Send this process's `crossrl` log records to stdout, every line marked."""
    logger = logging.getLogger("crossrl")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_MarkedLines("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
