"""What all suites share: engines by flag, the count of executed cases, and floors for it.

The shared suite reports each case it executed (engine, kernel, layout, dtype). The end of the
run prints the counts. Where the whole suite was asked for, a count below its floor, or a
combination that is missing, fails the run: a suite that silently shrank is not green.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

import backends
from tests.cases import LAYOUTS
from tests.engines.suite import DTYPES, ENGINE_KERNELS
from tests.engines.suite_dense import FEATURES

CASE = "executed case"
DENSE_CASE = "executed dense case"
PLANTED = "planted fault"

CASE_FLOOR = 50
"""Cases that each (engine, kernel, layout, dtype) must have executed in a full run."""

FAULT_FLOOR = 20
"""Planted faults that must have been caught in a full run."""

_planted_caught = pytest.StashKey[list[str]]()
_planted_missed = pytest.StashKey[list[str]]()
_counts = pytest.StashKey[Counter[tuple[str, str, str, str]]]()
_dense = pytest.StashKey[Counter[tuple[str, str, str]]]()
_narrowed = pytest.StashKey[str]()
_skipped = pytest.StashKey[list[str]]()
_failed_floors = pytest.StashKey[list[str]]()

_NEVER_SKIPPED = ("tests/engines/", "tests/equivalence/", "tests/faults/", "tests/layering/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-device",
        default="cpu",
        help="device of the engines under test: cpu (default), cuda or cuda:N",
    )
    parser.addoption(
        "--floors",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether too few executed cases fail the run; auto: where nothing was deselected",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_counts] = Counter()
    config.stash[_dense] = Counter()
    config.stash[_planted_caught] = []
    config.stash[_planted_missed] = []
    config.stash[_narrowed] = ""
    config.stash[_skipped] = []
    config.stash[_failed_floors] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/test_suite" in item.nodeid or "tests/faults" in item.nodeid:
            item.config.stash[_narrowed] = "tests were deselected"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Whether the whole shared suite was asked for: by no path at all, or by a folder of it."""
    root = session.config.rootpath
    suite, faults = root / "tests" / "engines", root / "tests" / "faults"
    asked = [str(a).split("::")[0] for a in session.config.args]
    whole = all(
        any((root / path).resolve() in (part, *part.parents) for path in asked)
        for part in (suite, faults)
    )
    by_node = any("::" in str(a) for a in session.config.args)
    if (not whole or by_node) and not session.config.stash[_narrowed]:
        session.config.stash[_narrowed] = "only a part of the tests was asked for"


@pytest.fixture(scope="session")
def load_engine(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """The engine of a flag, loaded once. One that is missing raises, and so fails its tests."""
    device = request.config.getoption("--engine-device")
    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            loaded[name] = backends.load(name, device=device)
        return loaded[name]

    return load


@pytest.fixture
def count_case(request: pytest.FixtureRequest) -> Callable[[str, str, str, str], None]:
    """Report one executed case of the shared suite; call it after the comparison."""

    def count(engine: str, kernel: str, layout: str, dtype: str) -> None:
        request.node.user_properties.append((CASE, (engine, kernel, layout, dtype)))

    return count


@pytest.fixture
def count_dense(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Report one dense call (engine, feature, dtype); call it after the comparison."""

    def count(engine: str, feature: str, dtype: str) -> None:
        request.node.user_properties.append((DENSE_CASE, (engine, feature, dtype)))

    return count


@pytest.fixture
def plant(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Name the planted fault that a test is about; it counts as caught if the test passes."""

    def name(fault: str) -> None:
        request.node.user_properties.append((PLANTED, fault))

    return name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and item.nodeid.startswith(_NEVER_SKIPPED):  # type: ignore[attr-defined]
        item.config.stash[_skipped].append(item.nodeid)
    if report.when == "call":  # type: ignore[attr-defined]
        for kind, value in item.user_properties:
            if kind == CASE and call.excinfo is None:
                item.config.stash[_counts][value] += 1
            if kind == DENSE_CASE and call.excinfo is None:
                item.config.stash[_dense][value] += 1
            if kind == PLANTED:
                key = _planted_caught if call.excinfo is None else _planted_missed
                item.config.stash[key].append(value)
    return report


def below_floor(
    counts: Mapping[tuple[str, str, str, str], int],
    dense: Mapping[tuple[str, str, str], int],
    caught: int,
    skipped: Sequence[str],
) -> list[str]:
    """What is missing for a full run: a line for each combination, the faults, each skip."""
    out = []
    for engine, kernel in ENGINE_KERNELS:
        for layout in LAYOUTS:
            for dtype in DTYPES:
                n = counts.get((engine, kernel, layout, dtype), 0)
                if n < CASE_FLOOR:
                    out.append(f"{engine} {kernel} {layout} {dtype}: {n} cases, floor {CASE_FLOOR}")
    for engine, _ in ENGINE_KERNELS:
        for dtype in DTYPES:
            absent = [f for f in FEATURES if not dense.get((engine, f, dtype))]
            if absent:
                out.append(f"{engine} dense {dtype}: never executed: {', '.join(absent)}")
    if caught < FAULT_FLOOR:
        out.append(f"planted faults: {caught} caught, floor {FAULT_FLOOR}")
    out.extend(f"skipped: {nodeid}" for nodeid in skipped)
    return out


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash, mode = session.config.stash, session.config.getoption("--floors")
    if session.config.option.collectonly or mode == "never":
        return
    if mode == "always" or not stash[_narrowed]:
        stash[_failed_floors] = below_floor(
            stash[_counts], stash[_dense], len(stash[_planted_caught]), stash[_skipped]
        )
        if stash[_failed_floors] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    counts = config.stash[_counts]
    write = terminalreporter.write_line
    if counts:
        terminalreporter.section("shared suite: executed cases")
        for engine, kernel in sorted({(e, k) for e, k, _, _ in counts}):
            for dtype in sorted({d for e, k, _, d in counts if (e, k) == (engine, kernel)}):
                cells = "  ".join(f"{x} {counts[engine, kernel, x, dtype]:4d}" for x in LAYOUTS)
                write(f"{engine:11s} {kernel:6s} {dtype:14s} {cells}")
        write(f"in all {sum(counts.values())}")
    dense = config.stash[_dense]
    for engine, dtype in sorted({(e, d) for e, _, d in dense}):
        done = sum((e, d) == (engine, dtype) for e, _, d in dense)
        write(f"{engine:11s} dense  {dtype:14s} {done} of {len(FEATURES)} features")
    caught, missed = config.stash[_planted_caught], config.stash[_planted_missed]
    if caught or missed:
        write(f"planted faults caught: {len(caught)} of {len(caught) + len(missed)}")
        for fault in missed:
            write(f"  not caught: {fault}")
    if (counts or caught) and config.stash[_narrowed] and config.getoption("--floors") == "auto":
        write(f"floors not applied: {config.stash[_narrowed]}")
    for line in config.stash[_failed_floors]:
        write(f"BELOW FLOOR: {line}", red=True)
