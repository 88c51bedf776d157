"""What can go wrong with a prompt whose K/V is kept from step to step."""

from __future__ import annotations

from layout_core.errors import LayoutError


class StaleContextError(LayoutError):
    """K/V in pages that does not follow from the prompt or the weights of this call."""
