"""What a comparison found: outcomes, labels, floors. No vLLM and no hypothesis here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EQUAL = "equal"
BOTH_REFUSE = "both refuse"


class Disagreement(AssertionError):
    """Ours and vLLM's answers differ, and no documented difference covers it."""


@dataclass
class Tally:
    """Counts of one kind of case.

    A case is counted once, when its comparison is through: ``outcomes`` says how it ended,
    ``labels`` what it exercised (a case has as many labels as apply).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """Cases that compared something."""
        return sum(self.outcomes.values())

    @property
    def equal(self) -> int:
        """Cases where both answered, and the answers are the same."""
        return self.outcomes[EQUAL]


@dataclass(frozen=True)
class Floor:
    """The least that a kind must have compared, as shares of the cases asked for.

    Args:
        equal: least share of cases where both sides gave an equal answer.
        refusals: least share of cases where both refused.
        labels: labels that must each occur in at least ``label_share`` of the cases.
    """

    equal: float
    refusals: float = 0.0
    labels: tuple[str, ...] = ()
    label_share: float = 0.01


def floor_failures(kind: str, tally: Tally, floor: Floor, asked: int) -> list[str]:
    """Every way in which a kind compared less than it must, in words."""
    failures = []
    for what, got, share in (
        ("compared", tally.cases, 1.0),
        ("equal", tally.equal, floor.equal),
        ("refused by both", tally.outcomes[BOTH_REFUSE], floor.refusals),
        *((f"with {label}", tally.labels[label], floor.label_share) for label in floor.labels),
    ):
        least = int(asked * share)
        if got < least:
            failures.append(f"{kind}: {got} cases {what}, expected at least {least}")
    return failures


def first_difference(mine: Any, peer: Any, where: str = "") -> tuple[str, Any, Any]:
    """The path to the first place where two nested values differ, and what stands there."""
    if isinstance(mine, dict) and isinstance(peer, dict) and list(mine) == list(peer):
        pairs = [(f"{where}.{key}", mine[key], peer[key]) for key in mine]
    elif (
        isinstance(mine, list | tuple) and isinstance(peer, list | tuple) and len(mine) == len(peer)
    ):
        pairs = [(f"{where}[{at}]", a, b) for at, (a, b) in enumerate(zip(mine, peer))]
    else:
        return where, mine, peer
    for path, a, b in pairs:
        if a != b:
            return first_difference(a, b, path)
    return where, mine, peer
