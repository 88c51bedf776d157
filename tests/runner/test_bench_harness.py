"""The timer of ``pagestride bench``: rounds, ratios, spreads, growth, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diffusion_runner.bench.harness import (
    Limits,
    Timed,
    compare,
    fitted_exponent,
    interleave,
    spread,
)
from diffusion_runner.errors import RunError


class Clock:
    """Time that only passes when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        calls = 0

        def work() -> None:
            nonlocal calls
            self.order.append(name)
            self.now += seconds(calls)
            calls += 1

        return work


def test_rounds_are_interleaved_each_in_an_order_of_its_own() -> None:
    clock = Clock()
    calls = {name: clock.call(name, lambda _: 1.0) for name in "abcd"}
    interleave(calls, Limits(rounds=20, seconds=100, least=2, warmup=1, settle=0), clock)
    rounds = ["".join(clock.order[at : at + 4]) for at in range(0, 84, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 5
    followers = {one[at + 1] for one in rounds for at in range(3) if one[at] == "a"}
    assert followers == set("bcd")


def test_warmup_rounds_do_not_count() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", lambda n: 100.0 if n < 2 else 1.0)}
    limits = Limits(rounds=4, seconds=1000, least=1, warmup=2)
    assert interleave(calls, limits, clock) == {"a": [1.0] * 4}


def test_a_slow_candidate_ends_after_its_seconds_and_a_fast_one_goes_on() -> None:
    clock = Clock()
    calls = {
        "slow": clock.call("slow", lambda _: 1.0),
        "fast": clock.call("fast", lambda _: 0.001),
    }
    times = interleave(calls, Limits(rounds=30, seconds=2.0, least=5, warmup=0), clock)
    assert len(times["fast"]) == 30
    assert len(times["slow"]) == 5
    # the base goes on for the others, and a ratio is of the rounds that both ran
    found = compare(
        "s", "c", calls, base="slow", limits=Limits(30, 2.0, 5, 0, settle=0), clock=clock
    )
    assert (found.timing("slow").samples, found.timing("fast").samples) == (30, 30)
    found = compare(
        "s", "c", calls, base="fast", limits=Limits(30, 2.0, 5, 0, settle=0), clock=clock
    )
    assert (found.timing("slow").samples, found.timing("fast").samples) == (5, 30)
    assert found.timing("slow").ratio.median == pytest.approx(1000)
    alone = {"slow": clock.call("slow", lambda _: 1.0)}
    assert len(interleave(alone, Limits(30, 2.0, 5, 0), clock)["slow"]) == 5


def test_a_ratio_compares_times_of_the_same_round() -> None:
    """The machine slows down tenfold half way: medians of times would say 5.5 or so."""
    clock = Clock()
    speed: Callable[[int], float] = lambda n: 1.0 if n < 5 else 10.0  # noqa: E731
    calls = {
        "base": clock.call("base", speed),
        "twice": clock.call("twice", lambda n: 2 * speed(n)),
    }
    found = compare(
        "s", "c", calls, base="base", limits=Limits(10, 1e9, 10, 0), clock=clock, details={"x": 1}
    )
    assert found.timing("twice").ratio.median == pytest.approx(2.0)
    assert found.timing("base").ratio.p90 == 1.0
    assert found.timing("twice").samples == 10
    assert found.details == {"x": 1}


def test_a_call_that_times_a_part_of_itself_is_believed() -> None:
    clock = Clock()

    def work() -> Timed:
        clock.now += 5.0
        return Timed(0.25)

    assert interleave({"a": work}, Limits(3, 100, 3, 0), clock) == {"a": [0.25] * 3}


def test_spread_is_the_median_with_the_outer_tenths() -> None:
    found = spread([float(n) for n in range(21)])
    assert (found.median, found.p10, found.p90) == (10.0, 2.0, 18.0)
    assert spread([3.0]).p90 == 3.0


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_fitted_exponent(power: float) -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert fitted_exponent(sizes, [3 * s**power for s in sizes]) == pytest.approx(power)


def test_what_is_refused() -> None:
    with pytest.raises(RunError, match=r"base: expected one of a, b, got 'c'"):
        compare("s", "c", {"a": int, "b": int}, base="c", limits=Limits())
    with pytest.raises(RunError, match=r"rounds: expected an int >= 1, got 0"):
        Limits(rounds=0)
    with pytest.raises(RunError, match=r"seconds: expected more than 0, got 0"):
        Limits(seconds=0)
    with pytest.raises(RunError, match=r"settle: expected at least 0, got -1"):
        Limits(settle=-1)
    with pytest.raises(RunError, match=r"two different sizes"):
        fitted_exponent([2.0, 2.0], [1.0, 1.0])
    found = compare("s", "case", {"a": int}, base="a", limits=Limits(1, 1, 1, 0))
    with pytest.raises(RunError, match=r"candidate: case has a; got 'b'"):
        found.timing("b")
