"""The worker's side: which blocks each installed row owns, for engines to read.

A :class:`RowTable` is a ``layout_core.rows.BlockTables``. Payloads are read by attribute, so
vLLM-Omni's own can be installed as well as ours. It may be used from several threads: one lock
serialises the changes, and readers see a row as it was before a change or after it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from threading import RLock
from typing import Any, NamedTuple

from block_manager.geometry import CacheGeometry, KVCacheConfigLike
from layout_core.errors import (
    AsleepError,
    BlockTableError,
    ConfigError,
    ConflictingAllocationError,
    RowError,
    StaleAllocationError,
    TransferError,
    UnknownRequestError,
)
from layout_core.rows import NULL_BLOCK_ID, PagedAttentionRow

Identity = tuple[str, int | str]
"""``(request_id, sequence_id)`` or ``(request_id, context_id)``, as ``PagedAttentionRow``'s."""


_LISTS = (tuple, list)


class _InstalledRow(NamedTuple):
    identity: Identity
    num_tokens: int
    first_key: int
    blocks: tuple[array[int], ...]  # for each group


class _Request(NamedTuple):
    generation: int
    snapshot: tuple[object, ...]  # all that a payload says, to compare with
    rows: tuple[_InstalledRow, ...]
    failed_blocks: tuple[int, ...] | None = None
    receiving: bool = False


class RowTable:
    """Block table rows of the requests that a worker has been told about.

    Args:
        kv_cache_config: ours or vLLM's.
        max_model_len: longest row, in tokens.
        max_rows: rows of all requests together, or ``None`` for no limit.
        max_rows_per_request: sequences and contexts of one request, or ``None``.
        null_block: whether block 0 is held back. Then it may stand in a row's table; a query
            that would see it is refused by ``prepare``.
        role_groups: see :meth:`CacheGeometry.from_config`; the same as the manager's.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfigLike,
        *,
        max_model_len: int,
        max_rows: int | None = None,
        max_rows_per_request: int | None = None,
        null_block: bool = True,
        role_groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_rows", max_rows),
            ("max_rows_per_request", max_rows_per_request),
        ):
            required = name == "max_model_len"
            if (value is None and required) or (
                value is not None and (type(value) is not int or value < 1)
            ):
                raise ConfigError(f"{name}: expected an int >= 1, got {value!r}")
        self.geometry = CacheGeometry.from_config(kv_cache_config, role_groups)
        self.max_model_len = max_model_len
        self.max_rows = max_rows
        self.max_rows_per_request = max_rows_per_request
        self.null_block = null_block
        self._lock = RLock()
        self._version = 0
        self._requests: dict[str, _Request] = {}
        self._rows: dict[Identity, _InstalledRow] = {}
        self._row_indices: dict[Identity, int] = {}
        self._freed_indices: list[int] = []  # a heap: the smallest goes first
        self._next_index = 0
        self._asleep = False

    # -- what is there ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change; a batch prepared under another version is stale."""
        return self._version

    @property
    def num_rows(self) -> int:
        """Installed rows."""
        return len(self._rows)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Installed requests, oldest first."""
        return tuple(self._requests)

    def generation(self, request_id: str) -> int | None:
        """Installed generation of a request, or ``None``."""
        request = self._requests.get(request_id)
        return None if request is None else request.generation

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        """Block ids of a row in a group, ``array("i")`` in position order; do not change it.

        Raises:
            UnknownRequestError: the row is not installed.
            TransferError: the request's K/V is being received, or failed to be; only the
                row's blocks are refused, with the ids that failed.
            BlockTableError: the group is out of range, the row is longer than what was
                installed, or looks at positions that were evicted.
            AsleepError: between sleep and wake-up.
        """
        installed = self._rows.get(row.identity)
        if installed is None:
            if self._asleep:
                raise AsleepError("block_ids: the row table is asleep; call wake_up first")
            raise UnknownRequestError(self._missing_message([row]))
        request = self._requests[row.request_id]
        if request.receiving or request.failed_blocks is not None:
            _check_readable(row.request_id, request)
        if row.seq_len > installed.num_tokens:
            raise BlockTableError(
                f"row {row.identity!r}: seq_len: expected at most the {installed.num_tokens} "
                f"tokens installed, got {row.seq_len}"
            )
        if row.first_key < installed.first_key:
            raise BlockTableError(
                f"row {row.identity!r}: first_key: positions before {installed.first_key} were "
                f"evicted, got {row.first_key}"
            )
        if not 0 <= group < len(installed.blocks):
            raise BlockTableError(
                f"group: expected an index in [0, {len(installed.blocks)}), got {group}"
            )
        return installed.blocks[group]

    def row_index(self, identity: Identity) -> int:
        """Index of an installed row among ``max_rows``; freed indices are used again."""
        index = self._row_indices.get(identity)
        if index is None:
            raise UnknownRequestError(f"row {identity!r}: is not installed")
        return index

    def require_rows(self, rows: Iterable[PagedAttentionRow]) -> None:
        """Raise ``UnknownRequestError`` naming every row that is not installed."""
        missing = [row for row in rows if row.identity not in self._rows]
        if missing:
            raise UnknownRequestError(self._missing_message(missing))

    # -- install, replace, remove -------------------------------------------------------

    def install(self, metadata: Any, *, num_sequences: int | None = None) -> bool:
        """Install a request's rows. ``False``: they were there, with the same blocks.

        Args:
            metadata: ``DiffusionKVMetadata``, ours or vLLM-Omni's.
            num_sequences: how many the request was declared with, where known.

        Raises:
            StaleAllocationError: an older generation than the installed one.
            ConflictingAllocationError: other rows than the installed ones. Use
                :meth:`replace` for a changed allocation, or remove the request first.
            BlockTableError: block ids out of range or repeated, or not exactly as many as the
                row's length needs.
            RowError: rows missing (all are named), repeated, or more than the limits.
        """
        with self._lock:
            request = self._read(metadata, num_sequences)
            request_id = metadata.request_id
            current = self._requests.get(request_id)
            if current is None:
                return self._put(request_id, None, request)
            self._check_not_stale(request_id, current, request)
            if request.snapshot != current.snapshot:
                raise ConflictingAllocationError(
                    f"request {request_id!r}: generation {request.generation} has other rows or "
                    f"blocks than the installed generation {current.generation}; call replace, or "
                    "remove the request first"
                )
            if request.generation > current.generation:  # the same rows under a newer number
                self._requests[request_id] = _Request(
                    request.generation,
                    current.snapshot,
                    current.rows,
                    current.failed_blocks,
                    current.receiving,
                )
            return False

    def replace(self, metadata: Any, *, num_sequences: int | None = None) -> bool:
        """Install what became of an installed request: grown, unshared or evicted rows.

        ``False``: it says what is installed already. A request that is not installed yet is
        installed. Raises as :meth:`install` does, but a newer generation may differ.
        """
        with self._lock:
            request = self._read(metadata, num_sequences)
            request_id = metadata.request_id
            current = self._requests.get(request_id)
            if current is None:
                return self._put(request_id, None, request)
            self._check_not_stale(request_id, current, request)
            same = request.snapshot == current.snapshot
            if request.generation == current.generation and not same:
                raise ConflictingAllocationError(
                    f"request {request_id!r}: generation {request.generation} is installed with "
                    "other rows or blocks; a changed allocation has a newer generation"
                )
            if current.failed_blocks is not None:
                _check_readable(request_id, current)
            if same:
                return self.install(metadata)
            return self._put(request_id, current, request)

    def remove(self, request_ids: Iterable[str | tuple[str, int]]) -> int:
        """Remove requests, by id or by ``(id, generation)``; returns how many rows that freed.

        A request that is not installed, or has another generation, is left as it is: its
        removal may come late, after a new request of that name was installed.
        """
        with self._lock:
            gone: dict[str, _Request] = {}
            for item in request_ids:
                request_id, generation = item if isinstance(item, tuple) else (item, None)
                request = self._requests.get(request_id)
                if request is not None and generation in (None, request.generation):
                    gone[request_id] = request
            return self._swap(gone, {}) if gone else 0

    # -- transfers ----------------------------------------------------------------------

    def begin_transfer(self, request_id: str) -> None:
        """The request's K/V is being received: no row of it is readable until it arrived."""
        self._mark(request_id, receiving=True, failed=None)

    def complete_transfer(self, request_id: str) -> None:
        """The request's K/V has arrived. A transfer that failed stays failed and raises."""
        with self._lock:
            request = self._installed(request_id)
            if request.failed_blocks is not None:
                _check_readable(request_id, request)
            self._mark(request_id, receiving=False, failed=None)

    def fail_transfer(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Blocks of the request were not received: its rows are refused until removed."""
        with self._lock:
            request = self._installed(request_id)
            own = {b for row in request.rows for blocks in row.blocks for b in blocks}
            failed = tuple(sorted(set(block_ids)))
            if not failed:
                raise BlockTableError(
                    f"request {request_id!r}: block_ids: expected at least one block"
                )
            foreign = [block for block in failed if block not in own]
            if foreign:
                raise BlockTableError(
                    f"request {request_id!r}: blocks {foreign} were reported as not received, and "
                    "no row of the request has them"
                )
            failed = tuple(sorted({*failed, *(request.failed_blocks or ())}))
            self._mark(request_id, receiving=False, failed=failed)

    # -- sleep --------------------------------------------------------------------------

    def sleep(self) -> None:
        """The pool's bytes are about to be dropped: no row is readable any more; all go."""
        with self._lock:
            self.remove(tuple(self._requests))
            self._asleep = True
            self._version += 1

    def wake_up(self) -> None:
        """The pool's memory is back, at whatever address: batches from before are stale."""
        with self._lock:
            self._asleep = False
            self._version += 1

    # -- for tests ----------------------------------------------------------------------

    def state(self) -> tuple[object, ...]:
        """Everything the table holds; equal states behave alike."""
        with self._lock:
            return (
                self._version,
                tuple(
                    sorted(
                        (k, r.generation, r.snapshot, r.failed_blocks, r.receiving)
                        for k, r in self._requests.items()
                    )
                ),
                {
                    identity: (id(row), self._row_indices[identity])
                    for identity, row in self._rows.items()
                },
                tuple(sorted(self._freed_indices)),
                self._next_index,
                self._asleep,
            )

    # -- inside -------------------------------------------------------------------------

    def _installed(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequestError(f"request {request_id!r}: is not installed")
        return request

    def _missing_message(self, rows: Sequence[PagedAttentionRow]) -> str:
        missing = ", ".join(repr(row.identity) for row in rows)
        requests = dict.fromkeys(row.request_id for row in rows)
        there = [identity for identity in self._rows if identity[0] in requests]
        return f"rows {missing}: are not installed; installed of these requests: {there}"

    def _check_not_stale(self, request_id: str, current: _Request, request: _Request) -> None:
        if request.generation < current.generation:
            raise StaleAllocationError(
                f"request {request_id!r}: generation {request.generation} is older than the "
                f"installed generation {current.generation}"
            )

    def _read(self, metadata: Any, num_sequences: int | None) -> _Request:
        """Check a payload and turn its lists into arrays; changes nothing."""
        if self._asleep:
            raise AsleepError("install: the row table is asleep; call wake_up first")
        request_id, generation = metadata.request_id, metadata.allocation_generation
        if not isinstance(request_id, str) or not request_id:
            raise RowError(f"metadata.request_id: expected a non-empty string, got {request_id!r}")
        where = f"request {request_id!r}"
        if type(generation) is not int or generation < 0:
            raise RowError(
                f"{where}: allocation_generation: expected an int >= 0, got {generation!r}"
            )
        sequences, contexts = metadata.sequences, metadata.contexts
        ids = [sequence.sequence_id for sequence in sequences]
        if num_sequences is not None and len(ids) != num_sequences:
            missing = [each for each in range(num_sequences) if each not in ids]
            raise RowError(
                f"{where}: {num_sequences} rows are declared, {len(ids)} supplied: sequence ids "
                f"{missing} are missing"
            )
        if not ids:
            raise RowError(f"{where}: expected at least one sequence, got none")
        limit = self.max_rows_per_request
        if limit is not None and len(ids) + len(contexts) > limit:
            raise RowError(
                f"{where}: has {len(ids) + len(contexts)} rows, max_rows_per_request is {limit}"
            )
        rows: list[_InstalledRow] = []
        snapshot: list[object] = []
        known = {context.context_id for context in contexts}
        for sequence in sequences:
            row, facts = self._read_sequence(where, request_id, sequence, known)
            rows.append(row)
            snapshot.append(facts)
        for context in contexts:
            context_id = context.context_id
            if not isinstance(context_id, str) or not context_id:
                raise RowError(
                    f"{where}: context_id: expected a non-empty string, got {context_id!r}"
                )
            at = f"{where}, context {context_id!r}"
            tokens = _length(at, "num_tokens", context.num_tokens)
            groups = self.geometry.groups_of_role(context.cache_role)
            blocks = self._read_blocks(at, tokens, groups, context.block_ids)
            rows.append(_InstalledRow((request_id, context_id), tokens, 0, blocks))
            snapshot.append((context_id, context.cache_role, tokens, blocks))
        identities = {row.identity for row in rows}
        if len(identities) != len(rows):
            names = [row.identity[1] for row in rows]
            raise RowError(f"{where}: expected distinct rows, got {names}")
        return _Request(generation, tuple(snapshot), tuple(rows))

    def _read_sequence(
        self, where: str, request_id: str, sequence: Any, contexts: set[str]
    ) -> tuple[_InstalledRow, tuple[object, ...]]:
        sequence_id = sequence.sequence_id
        if type(sequence_id) is not int or sequence_id < 0:
            raise RowError(f"{where}: sequence_id: expected an int >= 0, got {sequence_id!r}")
        at = f"{where}, sequence {sequence_id}"
        prefix = _length(at, "prefix_len", sequence.prefix_len)
        target = _length(at, "target_len", sequence.target_len)
        tokens = _length(at, "seq_len", sequence.seq_len)
        cached = _length(at, "cached_prefix_len", sequence.cached_prefix_len)
        first_key = _length(at, "first_key", getattr(sequence, "first_key", 0))
        if prefix + target > tokens:
            raise RowError(
                f"{at}: prefix_len + target_len: expected at most seq_len {tokens}, got "
                f"{prefix} + {target}"
            )
        for name, value in (("cached_prefix_len", cached), ("first_key", first_key)):
            if value > prefix:
                raise RowError(f"{at}: {name}: expected at most prefix_len {prefix}, got {value}")
        context_ids = tuple(sequence.context_ids)
        unknown = [each for each in context_ids if each not in contexts]
        if unknown:
            raise RowError(f"{at}: context_ids: the request has no contexts {unknown}")
        groups = self.geometry.sequence_groups
        blocks = self._read_blocks(at, tokens, groups, sequence.block_ids)
        row = _InstalledRow((request_id, sequence_id), tokens, first_key, blocks)
        facts = (sequence_id, prefix, target, tokens, cached, first_key, context_ids, blocks)
        return row, facts

    def _read_blocks(
        self, where: str, num_tokens: int, groups: Sequence[int], block_ids: Any
    ) -> tuple[array[int], ...]:
        if num_tokens > self.max_model_len:
            raise RowError(
                f"{where}: {num_tokens} tokens exceed max_model_len {self.max_model_len}"
            )
        sizes = self.geometry.block_sizes
        if not isinstance(block_ids, _LISTS) or len(block_ids) != len(sizes):
            count = len(block_ids) if isinstance(block_ids, _LISTS) else repr(block_ids)
            raise BlockTableError(
                f"{where}: block_ids: expected a list for each of {len(sizes)} groups, got {count}"
            )
        arrays = []
        for group, (ids, need) in enumerate(
            zip(block_ids, self.geometry.blocks_for(num_tokens, groups))
        ):
            if len(ids) != need:
                raise BlockTableError(
                    f"{where}, group {group}: expected exactly {need} blocks of {sizes[group]} "
                    f"tokens for {num_tokens} tokens, got {len(ids)}"
                )
            arrays.append(self._to_array(where, group, ids))
        return tuple(arrays)

    def _to_array(self, where: str, group: int, ids: Sequence[int]) -> array[int]:
        """``array("i")`` of ids that are ints in range and, but for the null block, distinct."""
        limit = self.geometry.num_blocks
        try:
            # unsigned first: it refuses negative ids, and is several times faster from a list
            raw = array("I", ids).tobytes()
        except (TypeError, OverflowError):
            raw = None  # an id that is no int of 32 bits: named below
        if raw and ids[0] <= ids[len(ids) // 2] <= ids[-1] < limit and _is_ascending(raw):
            return array("i", raw)  # the usual case: so all are distinct and in range
        if raw is None or not _all_below(limit, raw):
            bad, at = next(
                (each, at)
                for at, each in enumerate(ids)
                if not isinstance(each, int) or not 0 <= each < limit
            )
            raise BlockTableError(
                f"{where}, group {group}, entry {at}: expected a block id in [0, {limit}), "
                f"got {bad!r}"
            )
        distinct = set(ids)
        if len(distinct) != len(ids):
            nulls = ids.count(NULL_BLOCK_ID) if self.null_block else 0
            if len(distinct) + max(nulls - 1, 0) != len(ids):
                twice = next(
                    block
                    for block in ids
                    if ids.count(block) > 1 and not (self.null_block and block == NULL_BLOCK_ID)
                )
                raise BlockTableError(
                    f"{where}, group {group}: block {twice} stands twice in a row"
                )
        return array("i", raw)

    def _put(self, request_id: str, current: _Request | None, request: _Request) -> bool:
        """Make ``request`` the installed one."""
        gone = 0 if current is None else len(current.rows)
        if self.max_rows is not None:
            free = self.max_rows - len(self._rows) + gone
            if len(request.rows) > free:
                raise RowError(
                    f"request {request_id!r}: needs {len(request.rows)} rows, {free} of max_rows "
                    f"{self.max_rows} are free"
                )
        old = {} if current is None else {request_id: current}
        return self._swap(old, {request_id: request}) > 0

    def _swap(self, old: Mapping[str, _Request], new: Mapping[str, _Request]) -> int:
        """Replace requests, all of it or nothing. Returns how many rows went and came."""
        old_rows = {row.identity: row for request in old.values() for row in request.rows}
        new_rows = {row.identity: row for request in new.values() for row in request.rows}
        gone = [identity for identity in old_rows if identity not in new_rows]
        added = [identity for identity in new_rows if identity not in old_rows]
        indices = {identity: self._row_indices[identity] for identity in gone}
        before = (list(self._freed_indices), self._next_index, self._version)
        try:
            for request_id in old:
                del self._requests[request_id]
            for identity in gone:
                del self._rows[identity]
                heappush(self._freed_indices, self._row_indices.pop(identity))
            for identity in added:
                self._row_indices[identity] = self._take_index()
            self._rows.update(new_rows)
            self._requests.update(new)
            self._version += 1
            return len(old_rows) + len(new_rows)
        except BaseException:
            for identity in added:
                self._rows.pop(identity, None)
                self._row_indices.pop(identity, None)
            self._rows.update(old_rows)
            self._row_indices.update(indices)
            for request_id in new:
                self._requests.pop(request_id, None)
            self._requests.update(old)
            self._freed_indices, self._next_index, self._version = before
            raise

    def _take_index(self) -> int:
        if self._freed_indices:
            return heappop(self._freed_indices)
        self._next_index += 1
        return self._next_index - 1

    def _mark(self, request_id: str, *, receiving: bool, failed: tuple[int, ...] | None) -> None:
        with self._lock:
            request = self._installed(request_id)
            if failed is None and request.failed_blocks is not None:
                _check_readable(request_id, request)
            self._requests[request_id] = _Request(
                request.generation, request.snapshot, request.rows, failed, receiving
            )
            self._version += 1


@lru_cache(maxsize=1024)
def _lanes(count: int, value: int) -> int:
    """``value`` in each of ``count`` lanes of 32 bits."""
    return int.from_bytes(value.to_bytes(4, "little") * count, "little")


def _all_below(limit: int, raw: bytes) -> bool:
    """Whether the 32-bit unsigned integers of ``raw`` are below ``limit``, at most ``2**31``.

    All at once, as one long integer: unless a value has its top bit set, ``value + (2**31 -
    limit)`` has it exactly where ``value >= limit``, and nothing carries into the next lane.
    """
    count, values = len(raw) // 4, int.from_bytes(raw, sys.byteorder)
    beyond = values | (values + _lanes(count, (1 << 31) - limit))
    return beyond & _lanes(count, 1 << 31) == 0


def _is_ascending(raw: bytes) -> bool:
    """Whether the 32-bit unsigned integers of ``raw`` are below 2**31 and strictly ascending.

    All at once, as one long integer: ``later + (2**31 - 1) - earlier`` has its top bit set
    exactly where ``later > earlier``, and neither carries into the next lane nor borrows.
    """
    pairs = len(raw) // 4 - 1
    if pairs < 0:
        return True
    values = int.from_bytes(raw, "little")
    if sys.byteorder != "little" or values & _lanes(pairs + 1, 1 << 31):
        return False  # the caller looks at each one
    later, earlier = values >> 32, values & _lanes(pairs, (1 << 32) - 1)
    tops = _lanes(pairs, 1 << 31)
    return (later + _lanes(pairs, (1 << 31) - 1) - earlier) & tops == tops


def _length(where: str, name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise RowError(f"{where}: {name}: expected an int >= 0, got {value!r}")
    return value


def _check_readable(request_id: str, request: _Request) -> None:
    if request.failed_blocks is not None:
        raise TransferError(
            f"request {request_id!r}: the K/V of blocks {list(request.failed_blocks)} was not "
            "received and is not readable; remove the request",
            block_ids=request.failed_blocks,
        )
    raise TransferError(
        f"request {request_id!r}: its K/V is being received and is not readable yet"
    )
