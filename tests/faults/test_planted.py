"""Every planted fault turns its check red, by a comparison and not by a crash.

The run prints how many were caught; fewer than the floor fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.suite import ENGINE_KERNELS
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.checks import Check
from tests.tolerances import Mismatch

KERNELS = dict(ENGINE_KERNELS)

CASES = [
    pytest.param(fault, engine, id=f"{engine}-{fault.name}")
    for fault in FAULTS
    for engine in fault.engines
]


@pytest.fixture(scope="module")
def healthy() -> dict[tuple[Check, str], bool]:
    """Checks that were green without a fault, by check and engine."""
    return {}


@pytest.fixture
def fresh_programs() -> Iterator[Callable[[], None]]:
    """Call it to forget every compiled program; the end of the test forgets the faulty ones."""
    import jax

    used = False

    def forget() -> None:
        nonlocal used
        used = True
        jax.clear_caches()

    yield forget
    if used:
        jax.clear_caches()


@pytest.mark.parametrize(("fault", "engine"), CASES)
def test_a_planted_fault_is_caught(
    load_engine: Callable[[str], Any],
    plant: Callable[[str], None],
    healthy: dict[tuple[Check, str], bool],
    fresh_programs: Callable[[], None],
    fault: Fault,
    engine: str,
) -> None:
    plant(f"{engine}: {fault.name}")
    loaded, kernel = load_engine(engine), KERNELS[engine]
    if (fault.check, engine) not in healthy:
        fault.check(loaded, kernel)  # red without a fault would prove nothing
        healthy[fault.check, engine] = True
    with pytest.MonkeyPatch.context() as patch:
        if fault.compiled:
            fresh_programs()
        fault.plant(patch)
        with pytest.raises(Mismatch):
            fault.check(loaded, kernel)


def test_the_list_is_long_and_its_names_are_distinct() -> None:
    names = [(fault.name, engine) for fault in FAULTS for engine in fault.engines]
    assert len(set(names)) == len(names)
    assert len({fault.name for fault in FAULTS}) >= 20
