"""Candidates timed beside each other: interleaved rounds, medians, ratios of one round.

Every round runs all candidates once, in an order of its own, so that none always follows the same.
A ratio is the median over the rounds of a candidate's time in that of the base in the same
round, so that a machine that slows down slows both.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion_runner.errors import RunError


@dataclass(frozen=True, slots=True)
class Timed:
    """What a call returns that timed a part of itself, so that its preparation does not count."""

    seconds: float


Call = Callable[[], object]
"""Does the work once, and returns when it is done (a device has finished)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to measure: rounds go on until each candidate has enough samples or seconds.

    Args:
        rounds: samples of each candidate that are enough; >= 1.
        seconds: time of a slow candidate that is enough; > 0.
        least: rounds that are run in any case; >= 1.
        warmup: rounds before the first that counts; >= 0.
        settle: seconds of rest before each call; >= 0. Worker threads of one framework spin for
            some time after a call, and would slow down the next candidate where it is another's.
    """

    rounds: int = 30
    seconds: float = 2.0
    least: int = 5
    warmup: int = 2
    settle: float = 0.01

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("least", 1), ("warmup", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RunError(f"{name}: expected an int >= {least}, got {value!r}")
        if not self.seconds > 0:
            raise RunError(f"seconds: expected more than 0, got {self.seconds!r}")
        if not self.settle >= 0:
            raise RunError(f"settle: expected at least 0, got {self.settle!r}")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of samples with the values that a tenth of them lie below and above."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate of a comparison."""

    name: str
    seconds: Spread
    ratio: Spread  #: to the base, of the same round; below 1 is faster than the base
    samples: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidates that did the same work."""

    suite: str
    case: str
    base: str
    timings: tuple[Timing, ...]
    details: Mapping[str, Any] = field(default_factory=dict)  #: shapes, dtype: what JSON carries

    def timing(self, name: str) -> Timing:
        """The timing of a candidate.

        Raises:
            RunError: there is none of that name (lists them).
        """
        for found in self.timings:
            if found.name == name:
                return found
        have = ", ".join(t.name for t in self.timings)
        raise RunError(f"candidate: {self.case} has {have}; got {name!r}")


def spread(values: list[float]) -> Spread:
    """Median, 10th and 90th percentile (the nearest sample at or beyond)."""
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = ordered[int(0.1 * last)], ordered[-(int(0.1 * last) + 1)]
    return Spread(statistics.median(ordered), low, high)


def interleave(
    calls: Mapping[str, Call],
    limits: Limits,
    clock: Callable[[], float] = time.perf_counter,
    *,
    base: str | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call in each round that counts.

    A candidate that has enough sits out the rounds that others still need; ``base`` never does, so
    that the first rounds of a candidate are those of the base.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)  # the same in every run
    number = 0
    waiting = names
    while waiting:
        running = [name for name in names if name in waiting or name == base]
        for name in order.sample(running, len(running)):
            time.sleep(limits.settle)
            start = clock()
            result = calls[name]()
            spent = result.seconds if isinstance(result, Timed) else clock() - start
            if number >= limits.warmup:
                seconds[name].append(spent)
        number += 1
        if number - limits.warmup >= limits.least:
            waiting = [name for name in names if not _enough(seconds[name], limits)]
    return seconds


def _enough(times: list[float], limits: Limits) -> bool:
    return len(times) >= limits.rounds or sum(times) >= limits.seconds


def compare(
    suite: str,
    case: str,
    calls: Mapping[str, Call],
    *,
    base: str,
    limits: Limits,
    details: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time candidates that do the same work.

    Raises:
        RunError: ``base`` is none of them.
    """
    if base not in calls:
        raise RunError(f"base: expected one of {', '.join(calls)}, got {base!r}")
    seconds = interleave(calls, limits, clock, base=base)
    timings = tuple(
        Timing(
            name,
            spread(times),
            spread([a / b for a, b in zip(times, seconds[base], strict=False)]),
            len(times),
        )
        for name, times in seconds.items()
    )
    return Comparison(suite, case, base, timings, dict(details or {}))


def fitted_exponent(sizes: list[float], seconds: list[float]) -> float:
    """The least-squares slope of ``log(seconds)`` over ``log(sizes)``: 1 is linear growth.

    Raises:
        RunError: fewer than two different sizes.
    """
    if len(set(sizes)) < 2:
        raise RunError(f"sizes: a growth needs two different sizes, got {sizes}")
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope
