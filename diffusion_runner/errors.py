"""Errors of the runner: bad input that a command answers with one line and exit status 2."""

from __future__ import annotations


class RunError(ValueError):
    """A setting that cannot be run; the message names it, what was expected and what came."""
