"""Which blocks the rows of each request own: the scheduler's side.

Every call either does all it says or leaves the manager and its pool exactly as they were.
A manager may be used from several threads: one lock serialises its public methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from operator import sub
from threading import RLock

from block_manager.block_pool import BlockPool
from block_manager.geometry import CacheGeometry, KVCacheConfigLike
from block_manager.legality import usable_hit_len
from block_manager.metadata import (
    DiffusionKVMetadata,
    DiffusionKVUpdate,
)
from block_manager.prefix_keys import group_key
from block_manager.records import (
    Record,
    Row,
    Tables,
    check_order,
    check_readable,
    contexts_of,
    copy_tables,
    cut,
    holds,
    join_tables,
    payload_of,
)
from block_manager.requests import DiffusionKVContext, DiffusionKVRequest
from layout_core.errors import (
    AsleepError,
    BlockPoolError,
    ConfigError,
    DiffusionKVAdmissionError,
    RequestError,
    UnknownRequestError,
    UnsupportedError,
)
from layout_core.rows import NULL_BLOCK_ID


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Totals since the manager was made; counted when a request is admitted."""

    rows: int = 0  #: rows that had prefix keys
    tokens: int = 0  #: tokens of their prefixes
    hit_tokens: int = 0  #: of those, the ones found


class DiffusionKVCacheManager:
    """Reserves, shares, publishes, forks and frees the blocks of diffusion requests.

    Args:
        kv_cache_config: ours or vLLM's: the number of blocks, and each group's block size.
        max_model_len: longest row, in tokens.
        scheduler_block_size: a multiple of every group's block size. With several groups,
            prefix hits are multiples of it; with one, of its block size (as in vLLM).
        hash_block_size: tokens of one prefix key; it divides every group's block size.
        max_in_flight_tokens: accepted for vLLM-Omni's callers; blocks of a row are all
            reserved at once, so it changes nothing. >= 1 or ``None``.
        enable_prefix_caching: look up and publish finished prefixes.
        prefix_caching_hash_algo: only ``sha256``.
        null_block: whether block 0 is held back.
        clip_hits_to_shortest: give all rows of a request the shortest row's hit, as
            vLLM-Omni does; by default each row keeps its own.
        role_groups: see :meth:`CacheGeometry.from_config`.

    Raises:
        ConfigError: sizes that contradict each other.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfigLike,
        *,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_hash_algo: str = "sha256",
        null_block: bool = True,
        clip_hits_to_shortest: bool = False,
        role_groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        for name, value in (
            ("max_model_len", max_model_len),
            ("scheduler_block_size", scheduler_block_size),
            ("hash_block_size", hash_block_size),
            ("max_in_flight_tokens", 1 if max_in_flight_tokens is None else max_in_flight_tokens),
        ):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}: expected an int >= 1, got {value!r}")
        if prefix_caching_hash_algo != "sha256":
            raise ConfigError(
                f"prefix_caching_hash_algo: expected 'sha256', got {prefix_caching_hash_algo!r}"
            )
        geometry = CacheGeometry.from_config(kv_cache_config, role_groups)
        for group in geometry.sequence_groups:
            size = geometry.block_sizes[group]
            if scheduler_block_size % size:
                raise ConfigError(
                    f"scheduler_block_size: expected a multiple of group {group}'s block size "
                    f"{size}, got {scheduler_block_size}"
                )
            if enable_prefix_caching and size % hash_block_size:
                raise ConfigError(
                    f"hash_block_size: expected a divisor of group {group}'s block size {size}, "
                    f"got {hash_block_size}"
                )
        self.geometry = geometry
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.clip_hits_to_shortest = clip_hits_to_shortest
        sizes = [geometry.block_sizes[group] for group in geometry.sequence_groups]
        self._alignment = lcm(*sizes, scheduler_block_size if len(sizes) > 1 else 1)
        self._pool = BlockPool(
            geometry.num_blocks, null_block=null_block, enable_caching=enable_prefix_caching
        )
        self._lock = RLock()
        self._requests: dict[str, Record] = {}
        self._internal_ids: dict[str, str] = {}  # a row's own id -> its request
        self._next_generation = 1
        self._stats = PrefixCacheStats()
        self._asleep = False

    # -- what is there ------------------------------------------------------------------

    @property
    def block_pool(self) -> BlockPool:
        """The pool, to read from; change it through the manager only."""
        return self._pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be reserved now."""
        return self._pool.num_free_blocks

    @property
    def hit_alignment(self) -> int:
        """Prefix hits are multiples of this many tokens."""
        return self._alignment

    @property
    def stats(self) -> PrefixCacheStats:
        """Prefix cache totals."""
        return self._stats

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Admitted requests, oldest first."""
        with self._lock:
            return tuple(self._requests)

    def has_request(self, request_id: str) -> bool:
        """Whether a request is admitted."""
        return request_id in self._requests

    def get_metadata(self, request_id: str) -> DiffusionKVMetadata:
        """The payload of an admitted request, as of its last change.

        Raises:
            UnknownRequestError: the request is not admitted (also a ``KeyError``).
        """
        with self._lock:
            return payload_of(request_id, self._record(request_id))

    def required_blocks(self, rows: Sequence[DiffusionKVRequest]) -> int:
        """Blocks that rows of one request need in an empty pool: what admission charges."""
        contexts = contexts_of(rows)
        return sum(sum(self._blocks_of_row(row.seq_len)) for row in rows) + sum(
            sum(self._blocks_of_context(context)) for context in contexts
        )

    # -- reserve, publish, free ---------------------------------------------------------

    def reserve_request(
        self,
        request_id: str,
        rows: Sequence[DiffusionKVRequest],
        *,
        num_rows: int | None = None,
    ) -> DiffusionKVMetadata | None:
        """Reserve the blocks of all rows of a request, or of none.

        Finished prefix blocks that match are shared, and counted once however many rows share
        them; they are held before anything is allocated, so no row evicts another's hit.

        Args:
            request_id: not empty, not admitted yet.
            rows: in the order of their ``sequence_id``, which count from 0.
            num_rows: how many the request was declared with, where known.

        Returns:
            The payload, or ``None``: not now, blocks are held by others.

        Raises:
            DiffusionKVAdmissionError: never: not even in an empty pool, or longer than
                ``max_model_len``.
            RequestError: rows missing (all are named), out of order, or known already.
            PrefixCacheError: with prefix caching, a row with tokens whose prefix sees the
                target.
        """
        with self._lock:
            self._check_awake("reserve_request")
            rows = tuple(rows)
            self._check_new(request_id, rows, num_rows)
            contexts = contexts_of(rows)
            hits = self._find_hits(rows)
            needs = [self._blocks_of_row(row.seq_len) for row in rows]
            for at, (hit, found) in enumerate(hits):
                if hit:
                    needs[at] = tuple(map(sub, needs[at], map(len, found)))
            needs += map(self._blocks_of_context, contexts)
            new_blocks = sum(map(sum, needs))
            held = [block for hit, found in hits if hit for table in found for block in table]
            shared = set(held)
            required = new_blocks + len(shared)
            if required > self._pool.num_usable_blocks:
                raise DiffusionKVAdmissionError(
                    f"request {request_id!r}: can never be admitted: it needs {required} blocks, "
                    f"an empty pool has {self._pool.num_usable_blocks} available; make the pool "
                    "larger, or the request's rows fewer or shorter",
                    required_blocks=required,
                    available_blocks=self._pool.num_usable_blocks,
                )
            if new_blocks + self._pool.num_idle(shared) > self._pool.num_free_blocks:
                return None
            with self._change(request_id) as generation:
                if held:
                    self._pool.touch(held)
                tables = cut(self._pool.allocate(new_blocks), needs)
                record = Record(
                    generation,
                    tuple(
                        [
                            Row(row, join_tables(found, fresh) if hit else fresh, hit, 0, hit)
                            for row, (hit, found), fresh in zip(rows, hits, tables)
                        ]
                    ),
                    tuple(zip(contexts, tables[len(rows) :])),
                    receiving=any(row.kv_transfer_params is not None for row in rows),
                )
                metadata = payload_of(request_id, record)
                self._commit(request_id, record)
                self._count(rows, hits)
                return metadata

    def publish_request(self, request_id: str) -> int:
        """Say that the request's prefixes are computed; make their full blocks findable.

        Without prefix caching it only notes that they are computed. Returns how many blocks
        became findable now.

        Raises:
            UnknownRequestError: the request is not admitted.
            TransferError: its K/V is still being received, or failed to be; nothing is
                published.
        """
        with self._lock:
            record = self._record(request_id)
            check_readable(request_id, record)
            if not self.enable_prefix_caching:
                self._requests[request_id] = record._replace(computed=True)
                return 0
            with self._change(request_id, new_generation=False):
                published = sum(map(self._publish_row, record.rows))
                self._commit(request_id, record._replace(computed=True))
                return published

    def free_request(self, request_id: str) -> bool:
        """Let go of all blocks of a request, once. ``False``: it was not admitted.

        With caching, tails go before heads, so the beginnings of prompts stay longest.
        """
        with self._lock:
            record = self._requests.get(request_id)
            if record is None:
                return False
            with self._change(request_id, new_generation=False):
                # without caching in physical order, so that the next request's blocks are
                # adjacent (as vLLM-Omni does)
                self._pool.free(
                    self._release_order(record),
                    known=True,
                    in_id_order=not self.enable_prefix_caching,
                )
                del self._requests[request_id]
                for row in record.rows:
                    del self._internal_ids[row.request.request_id]
                return True

    def close(self) -> None:
        """Free every request."""
        with self._lock:
            for request_id in tuple(self._requests):
                self.free_request(request_id)

    # -- fork, grow, write --------------------------------------------------------------

    def fork_request(self, parent_id: str, child_id: str) -> DiffusionKVMetadata:
        """A second request that shares every block of all rows and contexts of the first.

        No bytes move and no block is allocated. Whoever writes to a shared block first, parent
        or child, must ask :meth:`make_writable` (or :meth:`advance_request`) before it.

        Raises:
            UnknownRequestError: the parent is not admitted.
            RequestError: the child is.
            TransferError: the parent's K/V is being received, or failed to be.
        """
        with self._lock:
            self._check_awake("fork_request")
            parent = self._record(parent_id)
            check_readable(parent_id, parent)
            requests = [
                replace(row.request, request_id=f"{child_id}/{row.request.sequence_id}")
                for row in parent.rows
            ]
            self._check_new(child_id, requests, None)
            with self._change(child_id) as generation:
                self._pool.touch([b for b in parent.block_ids() if self._is_block(b)])
                rows = tuple(
                    Row(
                        request,
                        copy_tables(row.tables),
                        max(row.cached_prefix_len, parent.computed_len(row)),
                        row.first_key,
                        parent.computed_len(row),
                    )
                    for request, row in zip(requests, parent.rows)
                )
                contexts = tuple(
                    (context, copy_tables(tables)) for context, tables in parent.contexts
                )
                record = Record(generation, rows, contexts)
                metadata = payload_of(child_id, record)
                self._commit(child_id, record)
                return metadata

    def make_writable(
        self, request_id: str, writes: Mapping[int, tuple[int, int]] | None = None
    ) -> DiffusionKVUpdate | None:
        """Give the request blocks of its own wherever it is about to write (copy-on-write).

        A block that others hold is replaced by a new one; if the write does not cover the
        whole block, its content must be copied first. A published block that only this
        request holds stays and is no longer findable.

        Args:
            request_id: an admitted request.
            writes: half-open position ranges by ``sequence_id``; by default
                ``[prefix_len, seq_len)`` of every row.

        Returns:
            The payload (unchanged, with the same generation, where nothing was shared) and the
            copies; or ``None``: not now, too few free blocks.
        """
        with self._lock:
            record = self._record(request_id)
            return self._rewrite(request_id, record, record.rows, writes)

    def advance_request(
        self,
        request_id: str,
        rows: Sequence[DiffusionKVRequest],
        writes: Mapping[int, tuple[int, int]] | None = None,
    ) -> DiffusionKVUpdate | None:
        """Replace the rows by longer ones (the next frame, the next block) and make them writable.

        Args:
            request_id: an admitted request.
            rows: one for each row the request has, with the same row ids and no shorter
                ``seq_len``; their prefixes begin with the old prefixes. Contexts stay.
            writes: as in :meth:`make_writable`, of the new rows.

        Returns:
            The payload and the copies, or ``None``: not now, too few free blocks.

        Raises:
            RequestError: rows missing (all are named), renamed or shorter.
            DiffusionKVAdmissionError: a row longer than ``max_model_len``.
        """
        with self._lock:
            record = self._record(request_id)
            check_readable(request_id, record)
            rows = tuple(rows)
            check_order(request_id, rows, len(record.rows))
            self._check_lengths(request_id, rows)
            for new, old in zip(rows, record.rows):
                if new.request_id != old.request.request_id:
                    raise RequestError(
                        f"request {request_id!r}: row {new.sequence_id}: expected the row id "
                        f"{old.request.request_id!r}, got {new.request_id!r}"
                    )
                for name in ("prefix_len", "seq_len"):
                    if getattr(new, name) < getattr(old.request, name):
                        raise RequestError(
                            f"request {request_id!r}: row {new.sequence_id}: {name}: expected at "
                            f"least {getattr(old.request, name)}, got {getattr(new, name)}"
                        )
            grown = tuple(
                old._replace(
                    request=new,
                    cached_prefix_len=max(old.cached_prefix_len, record.computed_len(old)),
                    computed_len=record.computed_len(old),
                )
                for new, old in zip(rows, record.rows)
            )
            return self._rewrite(request_id, record._replace(computed=False), grown, writes)

    # -- eviction -----------------------------------------------------------------------

    def evict_before(
        self, request_id: str, first_keys: Mapping[int, int] | int
    ) -> DiffusionKVMetadata:
        """Drop the oldest tokens of rows: positions before ``first_key`` are gone for good.

        Blocks that lie wholly before it are let go; one that holds later tokens too stays, and
        its dropped tokens are invisible (rows carry ``first_key``).

        Args:
            request_id: an admitted request.
            first_keys: the first position that stays, in ``[0, prefix_len]``, by
                ``sequence_id``, or one for all rows. One that is not past the row's present
                one changes nothing.

        Raises:
            RequestError: an unknown row, or a position outside the prefix.
            UnsupportedError: the pool has no null block to stand where blocks were.
        """
        with self._lock:
            record = self._record(request_id)
            if not self._pool.null_block:
                raise UnsupportedError(
                    "evict_before: the pool was made with null_block=False, and no id can stand in "
                    "a block table where a block was evicted"
                )
            if isinstance(first_keys, int):
                first_keys = {row.request.sequence_id: first_keys for row in record.rows}
            self._check_sequences(request_id, record, first_keys)
            rows, dropped = [], []
            for row in record.rows:
                first = first_keys.get(row.request.sequence_id, row.first_key)
                if not 0 <= first <= row.request.prefix_len:
                    raise RequestError(
                        f"request {request_id!r}: row {row.request.sequence_id}: first_key: "
                        f"expected a position in the prefix, [0, {row.request.prefix_len}], "
                        f"got {first}"
                    )
                first = max(first, row.first_key)
                tables = []
                for group, table in enumerate(row.tables):
                    gone = min(first // self.geometry.block_sizes[group], len(table))
                    dropped += [b for b in reversed(table[:gone]) if self._is_block(b)]
                    tables.append([NULL_BLOCK_ID] * gone + table[gone:])
                rows.append(
                    row._replace(
                        tables=tuple(tables),
                        first_key=first,
                        cached_prefix_len=max(row.cached_prefix_len, first),
                        computed_len=max(row.computed_len, first),
                    )
                )
            if all(new.first_key == old.first_key for new, old in zip(rows, record.rows)):
                return payload_of(request_id, record)
            with self._change(request_id) as generation:
                self._pool.free(dropped)
                record = record._replace(generation=generation, rows=tuple(rows))
                metadata = payload_of(request_id, record)
                self._commit(request_id, record)
                return metadata

    def evict_oldest(
        self, request_id: str, unit_tokens: int, units: int = 1
    ) -> DiffusionKVMetadata:
        """Drop the oldest ``units`` frames of ``unit_tokens`` tokens from every row.

        Frames start at multiples of ``unit_tokens`` and have nothing to do with pages.
        """
        with self._lock:
            if unit_tokens < 1 or units < 0:
                raise RequestError(
                    f"expected unit_tokens >= 1 and units >= 0, got {unit_tokens} and {units}"
                )
            return self.evict_before(
                request_id,
                {
                    row.request.sequence_id: (row.first_key // unit_tokens + units) * unit_tokens
                    for row in self._record(request_id).rows
                },
            )

    # -- transfers ----------------------------------------------------------------------

    def complete_transfer(self, request_id: str) -> None:
        """The request's K/V has arrived: it may be published and forked."""
        with self._lock:
            record = self._record(request_id)
            if record.failed_blocks is not None:
                check_readable(request_id, record)
            with self._change(request_id, new_generation=False):
                self._commit(request_id, record._replace(receiving=False))

    def fail_transfer(self, request_id: str, block_ids: Sequence[int]) -> tuple[str, ...]:
        """Blocks of the request were not received: they never become readable.

        Every request that holds one of them is failed: it cannot be published or forked, and
        its blocks are let go by its one ``free_request``.

        Returns:
            The failed requests, this one first.

        Raises:
            BlockPoolError: a block that the request does not hold; nothing changed.
        """
        with self._lock:
            record = self._record(request_id)
            failed = tuple(sorted(set(block_ids)))
            if not failed:
                raise RequestError(
                    f"request {request_id!r}: block_ids: expected at least one block"
                )
            own = set(record.block_ids())
            for block in failed:
                if block not in own or not self._is_block(block):
                    raise BlockPoolError(
                        f"request {request_id!r}: block {block!r} was reported as not received, "
                        "and the request does not hold it"
                    )
            holders = [request_id] + [
                other
                for other, each in self._requests.items()
                if other != request_id and holds(each, failed)
            ]
            with self._change(*holders, new_generation=False):
                self._pool.unpublish(failed)
                for holder in holders:
                    each = self._requests[holder]
                    bad = tuple(sorted({*failed, *(each.failed_blocks or ())}))
                    self._commit(holder, each._replace(receiving=False, failed_blocks=bad))
                return tuple(holders)

    def check_readable(self, request_id: str) -> None:
        """Raise ``TransferError``, with the block ids, unless all K/V of a request arrived."""
        with self._lock:
            check_readable(request_id, self._record(request_id))

    # -- sleep --------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forget all published prefixes (after a change of weights). Returns how many blocks."""
        with self._lock:
            return self._pool.reset_prefix_cache()

    def sleep(self) -> None:
        """The pool's bytes are about to be dropped: forget all published prefixes.

        Raises:
            RequestError: requests are admitted, whose K/V would be lost; they are named.
        """
        with self._lock:
            if self._requests:
                raise RequestError(
                    f"sleep: free these requests first, their K/V would be lost: "
                    f"{sorted(self._requests)}"
                )
            self._pool.reset_prefix_cache()
            self._asleep = True

    def wake_up(self) -> None:
        """The pool's memory is back, its contents are not. Harmless when awake."""
        with self._lock:
            if self._asleep:
                self._pool.reset_prefix_cache()
                self._asleep = False

    # -- for tests and soaks ------------------------------------------------------------

    def state(self) -> tuple[object, ...]:
        """Everything that decides what the manager does next; equal states behave alike."""
        with self._lock:
            requests = tuple(
                (
                    request_id,
                    record.generation,
                    (record.computed, record.receiving, record.failed_blocks),
                    tuple(
                        (
                            id(r.request),
                            (r.cached_prefix_len, r.first_key, r.computed_len),
                            tuple(map(tuple, r.tables)),
                        )
                        for r in record.rows
                    ),
                    tuple((c, tuple(map(tuple, tables))) for c, tables in record.contexts),
                )
                for request_id, record in sorted(self._requests.items())
            )
            return (
                requests,
                tuple(sorted(self._internal_ids.items())),
                self._next_generation,
                self._stats,
                self._asleep,
                self._pool.state(),
            )

    def check(self) -> None:
        """Raise ``BlockPoolError`` unless counts equal holds, and no block is lost."""
        with self._lock:
            self._pool.check()
            held: dict[int, int] = {}
            for record in self._requests.values():
                for block in record.block_ids():
                    if self._is_block(block):
                        held[block] = held.get(block, 0) + 1
            counted = self._pool.ref_counts()
            for block, times in held.items():
                if counted.get(block, 0) != times:
                    raise BlockPoolError(
                        f"block {block} is held {times} times and counted "
                        f"{counted.get(block, 0)} times"
                    )
            if len(held) + self._pool.num_free_blocks != self._pool.num_usable_blocks:
                raise BlockPoolError(
                    f"{len(held)} blocks held and {self._pool.num_free_blocks} free do not make "
                    f"{self._pool.num_usable_blocks}"
                )

    # -- inside -------------------------------------------------------------------------

    def _record(self, request_id: str) -> Record:
        record = self._requests.get(request_id)
        if record is None:
            raise UnknownRequestError(f"request {request_id!r}: is not admitted")
        return record

    def _is_block(self, block: int) -> bool:
        """Whether a table entry is a block of the request, not the place of an evicted one."""
        return block != NULL_BLOCK_ID or not self._pool.null_block

    def _check_awake(self, call: str) -> None:
        if self._asleep:
            raise AsleepError(f"{call}: the manager is asleep; call wake_up first")

    def _check_new(
        self, request_id: str, rows: Sequence[DiffusionKVRequest], num_rows: int | None
    ) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id: expected a non-empty string, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r}: is already admitted")
        check_order(request_id, rows, num_rows)
        self._check_row_ids(request_id, rows)
        self._check_lengths(request_id, rows)

    def _check_row_ids(self, request_id: str, rows: Sequence[DiffusionKVRequest]) -> None:
        ids = [row.request_id for row in rows]
        if len(set(ids)) == len(ids) and self._internal_ids.keys().isdisjoint(ids):
            return
        seen: set[str] = set()
        for row in rows:
            other = self._internal_ids.get(row.request_id)
            if other is not None:
                raise RequestError(
                    f"request {request_id!r}: row id {row.request_id!r} belongs to the admitted "
                    f"request {other!r}"
                )
            if row.request_id in seen:
                raise RequestError(
                    f"request {request_id!r}: row id {row.request_id!r} stands twice"
                )
            seen.add(row.request_id)

    def _check_lengths(self, request_id: str, rows: Sequence[DiffusionKVRequest]) -> None:
        for row in rows:
            longest = row.seq_len
            if row.kv_contexts:
                longest = max(longest, *(context.num_tokens for context in row.kv_contexts))
            if longest > self.max_model_len:
                raise DiffusionKVAdmissionError(
                    f"request {request_id!r}: can never be admitted: row {row.sequence_id}: "
                    f"{longest} tokens exceed max_model_len {self.max_model_len}"
                )

    def _check_sequences(
        self, request_id: str, record: Record, by_sequence: Mapping[int, object]
    ) -> None:
        known = {row.request.sequence_id for row in record.rows}
        unknown = sorted(set(by_sequence) - known)
        if unknown:
            raise RequestError(
                f"request {request_id!r}: has no rows {unknown}; it has {sorted(known)}"
            )

    def _blocks_of_row(self, num_tokens: int) -> tuple[int, ...]:
        return self.geometry.blocks_for(num_tokens, self.geometry.sequence_groups)

    def _blocks_of_context(self, context: DiffusionKVContext) -> tuple[int, ...]:
        groups = self.geometry.groups_of_role(context.cache_role)
        return self.geometry.blocks_for(context.num_tokens, groups)

    def _find_hits(self, rows: Sequence[DiffusionKVRequest]) -> list[tuple[int, Tables]]:
        """For each row, usable hit tokens and the blocks that hold them, for each group."""
        if not self.enable_prefix_caching:
            empty: Tables = tuple([[] for _ in self.geometry.block_sizes])
            return [(0, empty)] * len(rows)
        found = [self._longest_hit(row) for row in rows]
        if self.clip_hits_to_shortest:
            # the span rule may shorten one row's hit further, and so everyone's
            shortest = min(hit for hit, _ in found)
            while True:
                usable = min(
                    usable_hit_len(shortest, self._alignment, row.full_spans) for row in rows
                )
                if usable == shortest:
                    break
                shortest = usable
            found = [(shortest, tables) for _, tables in found]
        sizes = self.geometry.block_sizes
        return [
            (hit, tuple(table[: hit // size] for table, size in zip(tables, sizes)))
            for hit, tables in found
        ]

    def _longest_hit(self, row: DiffusionKVRequest) -> tuple[int, Tables]:
        keys = row.keys(self.hash_block_size)
        tables: Tables = tuple([] for _ in self.geometry.block_sizes)
        hit = len(keys) * self.hash_block_size
        lookup = self._pool.lookup
        for group in self.geometry.sequence_groups:
            table, size = tables[group], self.geometry.block_sizes[group]
            step = size // self.hash_block_size
            for at in range(step - 1, hit // self.hash_block_size, step):
                block = lookup(group_key(keys[at], group))
                if block is None:
                    break
                table.append(block)
            hit = min(hit, len(table) * size)
        return usable_hit_len(hit, self._alignment, row.full_spans), tables

    def _publish_row(self, row: Row) -> int:
        """Publish the row's full prefix blocks that are not published yet."""
        keys = row.request.keys(self.hash_block_size)
        length = len(keys) * self.hash_block_size // self._alignment * self._alignment
        published = 0
        for group in self.geometry.sequence_groups:
            size = self.geometry.block_sizes[group]
            step = size // self.hash_block_size
            # hits and earlier publications stand in front; evicted entries before them
            start = -(-row.first_key // size)
            table = row.tables[group]
            while start < length // size and self._pool.key_of(table[start]) is not None:
                start += 1
            blocks = table[start : length // size]
            of_group = keys[(start + 1) * step - 1 : length // self.hash_block_size : step]
            if group:
                of_group = [group_key(key, group) for key in of_group]
            published += self._pool.publish(blocks, of_group)
        return published

    def _rewrite(
        self,
        request_id: str,
        record: Record,
        rows: tuple[Row, ...],
        writes: Mapping[int, tuple[int, int]] | None,
    ) -> DiffusionKVUpdate | None:
        """Extend the tables of ``rows`` to their lengths, and unshare what will be written."""
        check_readable(request_id, record)
        if writes is None:
            writes = {
                row.request.sequence_id: (row.request.prefix_len, row.request.seq_len)
                for row in rows
            }
        self._check_sequences(request_id, record, writes)
        pool, sizes = self._pool, self.geometry.block_sizes
        pool.settle()  # counts are asked for block by block
        new_blocks = 0
        unshare: list[list[list[tuple[int, bool]]]] = []  # row, group: (entry, copy its bytes)
        own_published: list[int] = []
        for row in rows:
            start, end = writes.get(row.request.sequence_id, (row.first_key, row.first_key))
            if not row.first_key <= start <= end <= row.request.seq_len:
                raise RequestError(
                    f"request {request_id!r}: row {row.request.sequence_id}: writes: expected "
                    f"positions in [{row.first_key}, {row.request.seq_len}], got [{start}, {end})"
                )
            of_row: list[list[tuple[int, bool]]] = []
            needs = self._blocks_of_row(row.request.seq_len)
            for table, size, need in zip(row.tables, sizes, needs):
                entries: list[tuple[int, bool]] = []
                last = min(-(-end // size), len(table)) if start < end else 0
                for at in range(start // size, last):
                    block = table[at]
                    if pool.ref_count(block) > 1:
                        whole = start <= at * size and (at + 1) * size <= end
                        entries.append((at, not whole))
                    elif pool.key_of(block) is not None:
                        own_published.append(block)
                of_row.append(entries)
                new_blocks += len(entries) + max(need - len(table), 0)
            unshare.append(of_row)
        no_copies: tuple[list[tuple[int, int]], ...] = tuple([] for _ in sizes)
        unchanged = all(new is old for new, old in zip(rows, record.rows))
        if unchanged and not new_blocks:
            if own_published:
                pool.unpublish(own_published)
            return DiffusionKVUpdate(payload_of(request_id, record), no_copies)
        if new_blocks > pool.num_free_blocks:
            total = sum(sum(self._blocks_of_row(row.request.seq_len)) for row in rows)
            total += sum(len(t) for _, tables in record.contexts for t in tables)
            evicted = sum(1 for row in rows for t in row.tables for b in t if not self._is_block(b))
            if total - evicted > pool.num_usable_blocks:
                raise DiffusionKVAdmissionError(
                    f"request {request_id!r}: can never grow to this: it needs {total - evicted} "
                    f"blocks, an empty pool has {pool.num_usable_blocks} available",
                    required_blocks=total - evicted,
                    available_blocks=pool.num_usable_blocks,
                )
            return None
        with self._change(request_id) as generation:
            pool.unpublish(own_published)
            blocks = iter(pool.allocate(new_blocks))
            copies: tuple[list[tuple[int, int]], ...] = tuple([] for _ in sizes)
            let_go: list[int] = []
            written: list[Row] = []
            for row, of_row in zip(rows, unshare):
                tables = copy_tables(row.tables)
                needs = self._blocks_of_row(row.request.seq_len)
                for group, (table, entries) in enumerate(zip(tables, of_row)):
                    for at, copy in entries:
                        source, table[at] = table[at], next(blocks)
                        let_go.append(source)
                        if copy:
                            copies[group].append((source, table[at]))
                    table.extend(next(blocks) for _ in range(needs[group] - len(table)))
                written.append(row._replace(tables=tables))
            pool.free(let_go)
            record = record._replace(generation=generation, rows=tuple(written))
            metadata = payload_of(request_id, record)
            self._commit(request_id, record)
            return DiffusionKVUpdate(metadata, copies)

    def _release_order(self, record: Record) -> list[int]:
        """All blocks of a request; with caching in the order in which they should be reused."""
        tables = [row.tables for row in record.rows] + [t for _, t in record.contexts]
        blocks: list[int] = []
        if self.enable_prefix_caching:
            for groups in reversed(tables):
                for table in groups:
                    blocks += reversed(table)
        else:
            for table in chain.from_iterable(tables):  # as the pool handed them out
                blocks += table
        if any(row.first_key for row in record.rows):
            blocks = [block for block in blocks if self._is_block(block)]
        return blocks

    def _count(
        self, rows: Sequence[DiffusionKVRequest], hits: Sequence[tuple[int, Tables]]
    ) -> None:
        if not self.enable_prefix_caching:
            return
        before = self._stats
        keyed = [row for row in rows if row.cache_token_ids]
        self._stats = PrefixCacheStats(
            before.rows + len(keyed),
            before.tokens + sum(row.prefix_len for row in keyed),
            before.hit_tokens + sum(hit for hit, _ in hits),
        )

    def _commit(self, request_id: str, record: Record) -> None:
        self._requests[request_id] = record
        for row in record.rows:
            self._internal_ids[row.request.request_id] = request_id

    @contextmanager
    def _change(self, *request_ids: str, new_generation: bool = True) -> Iterator[int]:
        """Everything inside happens, or nothing; yields the generation to record."""
        before = [(each, self._requests.get(each)) for each in request_ids]
        generation, stats = self._next_generation, self._stats
        try:
            with self._pool.transaction():
                if new_generation:
                    self._next_generation += 1
                yield generation
        except BaseException:
            self._next_generation, self._stats = generation, stats
            for request_id, record in before:
                self._restore(request_id, record)
            raise

    def _restore(self, request_id: str, record: Record | None) -> None:
        present = self._requests.get(request_id)
        if present is record and record is None:
            return
        for row in present.rows if present is not None else ():
            self._internal_ids.pop(row.request.request_id, None)
        if record is None:
            self._requests.pop(request_id, None)
        else:
            self._commit(request_id, record)
