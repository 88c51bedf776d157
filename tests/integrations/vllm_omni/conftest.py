"""The count of planted faults, which a run prints."""

from __future__ import annotations

import pytest

PLANTED = "check_faults.py::test_a_planted_fault_is_caught"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = {
        outcome: [r for r in terminalreporter.getreports(outcome) if PLANTED in r.nodeid]
        for outcome in ("passed", "failed")
    }
    caught, missed = len(reports["passed"]), len(reports["failed"])
    if caught or missed:
        terminalreporter.write_line(f"planted faults caught: {caught} of {caught + missed}")
