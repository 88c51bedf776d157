"""How two answers are compared: values, refusals, documented differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layout_core import LayoutError
from tests.conformance.differences import WE_ANSWER, WE_FOLLOW, WE_REFUSE
from tests.conformance.peers import REFUSALS
from tests.conformance.tally import BOTH_REFUSE, EQUAL, Disagreement, first_difference


@dataclass(frozen=True)
class Answer:
    """What one side said: a value, or its refusal."""

    value: Any = None
    error: Exception | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"raises {type(self.error).__name__}: {self.error}"
        return repr(self.value)


def ours(call: Callable[[], Any]) -> Answer:
    """Our answer. Anything raised that is no ``LayoutError`` is our fault and goes on up."""
    try:
        return Answer(call())
    except LayoutError as error:
        return Answer(error=error)


def theirs(call: Callable[[], Any]) -> Answer:
    """vLLM's answer."""
    try:
        return Answer(call())
    except REFUSALS as error:
        return Answer(error=error)


def refusal(name: str | None) -> str:
    """The outcome of a documented refusal of ours."""
    if name not in WE_REFUSE:
        raise Disagreement(f"{name!r} is no documented refusal")
    return f"we refuse: {name}"


def difference(name: str) -> str:
    """The outcome of another documented difference."""
    if name in WE_FOLLOW:
        return f"versions differ: {name}"
    if name in WE_ANSWER:
        return f"we answer otherwise: {name}"
    raise Disagreement(f"{name!r} is no documented difference")


def judge(
    what: str,
    case: object,
    our: Answer,
    their: Answer,
    *,
    we_refuse: Callable[[], str | None] = lambda: None,
    we_differ: Callable[[], str | None] = lambda: None,
) -> str:
    """The outcome of one comparison.

    Args:
        what, case: what was compared, for the message.
        we_refuse: names the documented refusal where we alone refuse, or ``None``.
        we_differ: names another documented difference where the answers differ, or ``None``.

    Raises:
        Disagreement: the answers differ in a way that no document covers.
    """
    if our.error is not None and their.error is not None:
        return BOTH_REFUSE
    if our.error is not None:
        name = we_refuse()
        if name is not None:
            return refusal(name)
    elif their.error is None and our.value == their.value:
        return EQUAL
    name = we_differ()
    if name is not None:
        return difference(name)
    if our.error is None and their.error is None:
        where, mine, peer = first_difference(our.value, their.value)
        raise Disagreement(
            f"{what} of {case}:\n  at {where or 'the top'}: ours {mine!r}, vLLM {peer!r}"
        )
    raise Disagreement(f"{what} of {case}:\n  ours   {our}\n  vLLM   {their}")
