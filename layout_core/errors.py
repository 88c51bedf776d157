"""Every failure that the layout core, the block manager and the engines can raise.

One class for each kind of failure, so that a caller can tell "this configuration can never
work" (:class:`LayoutError` subclasses from resolution) from "not now" and from "your rows are
wrong". A message names the argument, what was expected, what came, and where (layer, row,
group). All derive from :class:`ValueError` through :class:`LayoutError`, as vLLM and vLLM-Omni
raise ``ValueError`` in the same places.
"""

from __future__ import annotations


class LayoutError(ValueError):
    """Base of every error raised on purpose by pagestride."""


class UnknownLayoutError(LayoutError):
    """A name that is no KV cache layout and no alias of one."""


class UnknownDTypeError(LayoutError):
    """A dtype that is not in the core's table."""


class SpecError(LayoutError):
    """A KV cache spec whose fields contradict each other or are out of range."""


class MergeError(SpecError):
    """Specs that cannot share one KV cache group."""


class StrideError(LayoutError):
    """Strides or a block split that one stride per axis cannot address."""


class IllegalCombinationError(LayoutError):
    """A layout that cannot hold this padding, page mix, group overlay or block split."""


class OverlapError(LayoutError):
    """Two cells share a byte, or a cell lies outside the allocation."""


class IndexLimitError(LayoutError):
    """An address does not fit the integer type that a kernel computes it in."""


class ConfigError(LayoutError):
    """A KV cache config that does not follow from its own layout, groups and specs."""


class UnresolvedLayoutError(LayoutError):
    """The layout was asked for before it was resolved."""


class LayoutConflictError(LayoutError):
    """Two parties demand different layouts (backend, connector, config, worker)."""


class AdoptionError(LayoutConflictError):
    """One or more workers did not adopt the control plane's layout; says which rank and why."""


class InsufficientMemoryError(LayoutError):
    """The memory given cannot hold one request of the maximum length."""


class BlockSizeError(LayoutError):
    """No block size, or not this one, is accepted by every backend."""


class RowError(LayoutError):
    """A paged attention row that contradicts itself or its neighbours."""


class BlockTableError(LayoutError):
    """A block id out of range, a null block where a query looks, or a table too short."""


class StaleBatchError(LayoutError):
    """A batch prepared before the row table changed."""


class VisibilityError(LayoutError):
    """A visibility rule or a span list that is malformed or contradictory."""


class TensorError(LayoutError):
    """An array whose shape, dtype or device is not what the plan demands."""


class PoolError(LayoutError):
    """A pool that was consumed, belongs to another plan, or has the wrong size."""


class UnsupportedError(LayoutError):
    """A legal request that this engine or kernel does not serve; the message says which does."""


class PlatformError(UnsupportedError, NotImplementedError):
    """An attention implementation has no method for the platform of its arrays."""


class UnknownBackendError(LayoutError):
    """A backend flag that names no registered engine."""


class MissingPackageError(LayoutError):
    """A backend was asked for and the package it needs is not installed."""


class DeviceError(LayoutError):
    """A device was asked for that is not there."""


class BlockPoolError(LayoutError):
    """A block freed once too often, a foreign id, or more blocks asked for than are free."""


class RequestError(LayoutError):
    """A request or context of the block manager whose fields contradict each other."""


class UnknownRequestError(LayoutError, KeyError):
    """A request or row that is not allocated or not installed here."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class DiffusionKVAdmissionError(LayoutError):
    """A request that can never be admitted, not even to an empty pool.

    ``required_blocks`` and ``available_blocks`` are set where the pool is too small, and
    ``None`` where a length limit refused the request.
    """

    def __init__(
        self,
        message: str,
        *,
        required_blocks: int | None = None,
        available_blocks: int | None = None,
    ) -> None:
        super().__init__(message)
        self.required_blocks = required_blocks
        self.available_blocks = available_blocks


class PrefixCacheError(LayoutError):
    """A prefix whose K/V cannot be reused without loss, or keyed without ambiguity."""


class StaleAllocationError(LayoutError):
    """A payload older than what a worker has installed."""


class ConflictingAllocationError(LayoutError):
    """A payload that contradicts the rows installed for an active request."""


class TransferError(LayoutError):
    """K/V that was being received, or failed to be: it is not readable.

    ``block_ids`` are the blocks that the failed receive reported, in ascending order.
    """

    def __init__(self, message: str, *, block_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.block_ids = block_ids


class AsleepError(LayoutError):
    """A manager or row table used between sleep and wake-up."""
