"""Who owns which block of one pool: reference counts, free blocks, and the cached idle ones.

Every operation costs O(1) for each block it names, whatever the size of the pool, and a new
pool costs O(1): a block that was never handed out stands nowhere. Blocks are handed out in
this order: freed blocks without content (last freed first), blocks never used (by id), cached
blocks that nobody holds (least recently used first). That is the order of vLLM's pool.

Bulk operations on built-in sets, dicts and deques do the work, so that a block costs some tens
of nanoseconds. Not thread-safe by itself:
:class:`~block_manager.cache_manager.DiffusionKVCacheManager` is, and owns its pool.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain, repeat

from layout_core.errors import BlockPoolError

_Undo = Callable[[], None]


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each free, held ``n`` times, or idle with cached content.

    Args:
        num_blocks: physical blocks, the null block included.
        null_block: hold back block 0 for ever; then ``num_blocks - 1`` are usable, and
            ``num_blocks`` must be at least 2. Without it all ids are handed out.
        enable_caching: whether blocks can be published under a key and found again.

    Raises:
        BlockPoolError: ``num_blocks`` leaves no usable block.
    """

    def __init__(
        self, num_blocks: int, *, null_block: bool = True, enable_caching: bool = False
    ) -> None:
        least = 2 if null_block else 1
        if type(num_blocks) is not int or num_blocks < least:
            raise BlockPoolError(
                f"num_blocks: expected an int >= {least} with null_block={null_block}, "
                f"got {num_blocks!r}"
            )
        self.num_blocks = num_blocks
        self.null_block = null_block
        self.enable_caching = enable_caching
        self._first = 1 if null_block else 0
        self._fresh = self._first  # this id and all above were never handed out
        self._stack: list[int] = []  # free and without content; the last one goes first
        self._held: set[int] = set()  # but for the blocks of `_whole`
        # What `allocate` handed out and nobody named since, by first block. Most come back as
        # they went, in one comparison; else `settle` makes their blocks count one by one.
        self._whole: dict[int, list[int]] = {}
        self._more: dict[int, int] = {}  # holds beyond the first, where there are any
        # Published blocks. A key may have several; then the first one published is found.
        self._keys: dict[int, bytes] = {}
        self._index: dict[bytes, int | list[int]] = {}
        # Published and not held: block -> when it became so. `_queue` has them in that order,
        # among entries that no longer count because the block was held again since.
        self._idle: dict[int, int] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._clock = 0
        self._journal: list[_Undo] | None = None

    # -- what is there ------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that an empty pool can hand out."""
        return self.num_blocks - self._first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, idle cached ones included."""
        return len(self._stack) + self.num_blocks - self._fresh + len(self._idle)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that are published, held or idle."""
        return len(self._keys)

    def get_num_free_blocks(self) -> int:
        """vLLM's name for :attr:`num_free_blocks`."""
        return self.num_free_blocks

    def ref_count(self, block_id: int) -> int:
        """How many rows hold a block; 0 for the null block and for free ones.

        O(1) after :meth:`settle`; before it, what was handed out since is searched.
        """
        self._check_id(block_id)
        if block_id in self._held:
            return 1 + self._more.get(block_id, 0)
        return int(any(block_id in batch for batch in tuple(self._whole.values())))

    def ref_counts(self) -> dict[int, int]:
        """How many rows hold each held block. O(held blocks)."""
        counts = dict.fromkeys(chain(self._held, *self._whole.values()), 1)
        for block, more in self._more.items():
            counts[block] += more
        return counts

    def key_of(self, block_id: int) -> bytes | None:
        """The key under which a block is published, or ``None``."""
        return self._keys.get(block_id)

    def is_writable(self, block_id: int) -> bool:
        """Whether its one holder may write: not the null block, not shared, not published."""
        return self.ref_count(block_id) == 1 and block_id not in self._keys

    def num_idle(self, block_ids: set[int]) -> int:
        """How many of these blocks are published and held by nobody."""
        return len(self._idle.keys() & block_ids)

    def lookup(self, key: bytes) -> int | None:
        """A block published under ``key`` (the first one, where several are), or ``None``."""
        found = self._index.get(key)
        return found[0] if isinstance(found, list) else found

    # -- what changes -------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, each held once. Cached blocks taken lose their content.

        Raises:
            BlockPoolError: fewer than ``count`` blocks are free; nothing was handed out.
        """
        if type(count) is not int or count < 0:
            raise BlockPoolError(f"count: expected an int >= 0, got {count!r}")
        if count > self.num_free_blocks:
            raise BlockPoolError(
                f"count: {count} blocks asked for, {self.num_free_blocks} are free"
            )
        stacked = min(count, len(self._stack))
        ids: list[int] = []
        if stacked:
            ids = self._stack[: -stacked - 1 : -1]
            del self._stack[-stacked:]
        fresh = min(count - stacked, self.num_blocks - self._fresh)
        if fresh:
            ids.extend(range(self._fresh, self._fresh + fresh))
            self._fresh += fresh
        popped: list[tuple[int, int]] = []
        evicted: list[tuple[int, bytes, int]] = []
        if stacked + fresh < count:
            popped, evicted = self._evict_idle(count - stacked - fresh)
            ids += [block for block, _, _ in evicted]
        batch = ids.copy()  # the caller owns `ids`
        if batch:
            self._whole[batch[0]] = batch
        if self._journal is not None:
            self._journal.append(
                lambda: self._undo_allocate(batch, stacked, fresh, popped, evicted)
            )
        return ids

    def settle(self) -> None:
        """Count every held block by itself. Changes only what it costs to ask for counts."""
        for batch in self._whole.values():
            self._held.update(batch)
        self._whole.clear()

    def touch(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more. An id given twice is held twice.

        Raises:
            BlockPoolError: an id out of range, the null block, or a free block without
                content; no count changed.
        """
        self.settle()
        held, idle = self._held, self._idle
        for block in block_ids:
            if block not in held and block not in idle:
                self._check_id(block)
                if block < self._first:
                    raise BlockPoolError(f"block_ids: block {block} is the null block")
                raise BlockPoolError(
                    f"block_ids: block {block} is free and holds nothing, so it cannot be shared"
                )
        woken: list[tuple[int, int]] = []
        more = self._more
        for block in block_ids:
            if block in held:
                more[block] = more.get(block, 0) + 1
            else:
                woken.append((block, idle.pop(block)))
                held.add(block)
        if self._journal is not None:
            ids = tuple(block_ids)
            self._journal.append(lambda: self._undo_touch(ids, woken))

    def free(
        self, block_ids: Sequence[int], *, known: bool = False, in_id_order: bool = False
    ) -> None:
        """Let go of blocks once for each time they are named.

        The order is that of eviction: what comes first is reused first. Blocks that nobody
        holds any more keep their content only if they are published.

        Args:
            block_ids: the blocks.
            known: every id came from this pool, so none is a float or a NumPy integer that
                equals one; counts are checked all the same.
            in_id_order: reuse them in the order of their ids, not in the order given.

        Raises:
            BlockPoolError: an id out of range, the null block, or more frees than holds;
                no count changed.
        """
        let_go = self._let_go(block_ids, known)
        order = sorted(let_go) if in_id_order else list(let_go)
        keys = self._keys
        if keys and not keys.keys().isdisjoint(order):
            last = [block for block in order if block in keys]
            first = []
            if len(last) < len(order):
                first = [block for block in order if block not in keys]
            self._clock += 1
            self._idle.update(dict.fromkeys(last, self._clock))
            self._queue.extend(zip(last, repeat(self._clock)))
        else:
            first, last = order, []
        first.reverse()
        self._stack += first
        if self._journal is not None:
            ids = tuple(block_ids)  # the caller owns `block_ids`
            self._journal.append(lambda: self._undo_free(ids, len(first), last))
        else:
            self._drop_old_entries()

    def publish(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> int:
        """Make held blocks findable, each under its key; returns how many were not before.

        Several blocks may have one key: tables never change under their owner, so a second
        copy stays a second copy, as in vLLM.

        Raises:
            BlockPoolError: caching is off, the lengths differ, or a block is not held or has
                another key; nothing was published.
        """
        if not self.enable_caching:
            raise BlockPoolError("publish: enable_caching is False")
        if len(block_ids) != len(keys):
            raise BlockPoolError(f"publish: {len(block_ids)} blocks and {len(keys)} keys")
        self.settle()
        if not self._held.issuperset(block_ids):
            unheld = next(block for block in block_ids if block not in self._held)
            raise BlockPoolError(f"block {unheld!r}: cannot be published, nobody holds it")
        new = dict(zip(block_ids, keys))
        if len(new) < len(block_ids) or not self._keys.keys().isdisjoint(block_ids):
            for block, key in zip(block_ids, keys):
                if self._keys.get(block, key) != key or new[block] != key:
                    raise BlockPoolError(f"block {block}: already published under another key")
            for block in self._keys.keys() & new.keys():
                del new[block]
        self._keys.update(new)
        blocks = list(new)
        found = list(map(self._index.setdefault, new.values(), blocks))
        if found != blocks:  # some keys have a block already
            for (block, key), first in zip(new.items(), found):
                if first != block:
                    self._index_insert(key, block, None)
        if self._journal is not None:
            self._journal.append(lambda: self._undo_publish(new))
        return len(new)

    def unpublish(self, block_ids: Sequence[int]) -> int:
        """Make blocks unfindable; idle ones become free without content. Returns how many."""
        for block in block_ids:
            self._check_id(block)
        gone: list[tuple[int, bytes, int, int | None]] = []
        for block in block_ids:
            key = self._keys.pop(block, None)
            if key is None:
                continue
            since = self._idle.pop(block, None)
            gone.append((block, key, self._index_remove(key, block), since))
            if since is not None:
                self._stack.append(block)
        if self._journal is not None:
            self._journal.append(lambda: self._undo_unpublish(gone))
        return len(gone)

    def reset_prefix_cache(self) -> int:
        """Forget all published content, of held blocks too. Returns how many were findable."""
        return self.unpublish(sorted(self._keys))

    # -- all or nothing -----------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[None]:
        """Undo every change made inside if the block raises: the same ids, counts and order."""
        return _Transaction(self)

    def _begin(self) -> None:
        if self._journal is not None:
            raise BlockPoolError("transaction: one is already open on this pool")
        self._journal = []

    def _end(self, undo: bool) -> None:
        journal, self._journal = self._journal, None
        if undo:
            for step in reversed(journal or ()):
                step()
        else:
            self._drop_old_entries()

    # -- for tests and soaks ------------------------------------------------------------

    def state(self) -> tuple[object, ...]:
        """Everything that decides what the pool does next; equal states behave alike."""
        return (
            self._fresh,
            tuple(self._stack),
            tuple(sorted(self._held.union(*self._whole.values()))),
            tuple(sorted(self._more.items())),
            tuple(self._idle_order()),
            tuple(sorted(self._keys.items())),
            tuple(sorted((k, v if isinstance(v, int) else (*v,)) for k, v in self._index.items())),
        )

    def check(self) -> None:
        """Raise ``BlockPoolError`` unless every block is in exactly one place. O(num_blocks)."""
        idle = self._idle_order()
        places = Counter(self._stack)
        places.update(idle)
        places.update(self._held)
        places.update(chain.from_iterable(self._whole.values()))
        for block in range(self._first, self._fresh):
            if places[block] != 1:
                raise BlockPoolError(f"block {block}: stands in {places[block]} places, not in one")
        if len(places) != self._fresh - self._first:
            raise BlockPoolError(f"ids outside [{self._first}, {self._fresh}) are in use")
        for block, more in self._more.items():
            if more < 1 or block not in self._held:
                raise BlockPoolError(f"block {block}: has {more} more holds")
        if len(idle) != len(self._idle):
            raise BlockPoolError(f"{len(idle)} idle blocks are queued, {len(self._idle)} exist")
        published = {(key, block) for block, key in self._keys.items()}
        indexed = [
            (key, block)
            for key, found in self._index.items()
            for block in ([found] if isinstance(found, int) else found)
        ]
        if len(indexed) != len(published) or set(indexed) != published:
            raise BlockPoolError("the index and the blocks' keys disagree")
        for block in idle:
            if block not in self._keys:
                raise BlockPoolError(f"block {block}: is idle and not published")
        for block in self._stack:
            if block in self._keys:
                raise BlockPoolError(f"block {block}: is free without content and published")

    # -- inside -------------------------------------------------------------------------

    def _check_id(self, block_id: int) -> None:
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            raise BlockPoolError(
                f"block id: expected an int in [0, {self.num_blocks}), got {block_id!r}"
            )

    def _let_go(self, block_ids: Sequence[int], known: bool) -> Sequence[int]:
        """Take off the holds; returns the blocks that nobody holds any more, in order."""
        if known and block_ids and self._whole.get(block_ids[0]) == block_ids:
            return self._whole.pop(block_ids[0])  # just as they were handed out: held once each
        self.settle()
        let_go = self._let_go_distinct(block_ids, known)
        return self._let_go_counted(block_ids) if let_go is None else let_go

    def _let_go_distinct(self, block_ids: Sequence[int], known: bool) -> Sequence[int] | None:
        """The usual case, in bulk: all distinct, all held exactly once. Else ``None``."""
        if self._more and not self._more.keys().isdisjoint(block_ids):
            return None
        before = len(self._held)
        try:
            if known or not block_ids or type(sum(block_ids)) is int:
                self._held.difference_update(block_ids)
                if before - len(self._held) == len(block_ids):
                    return block_ids
        except TypeError:
            pass  # ids that are no numbers: the caller goes on to name them
        # Not the usual case, and rare: put back what was held, which is what is not free.
        if len(self._held) != before:
            self._held = set(range(self._first, self._fresh)).difference(self._stack, self._idle)
        return None

    def _let_go_counted(self, block_ids: Sequence[int]) -> list[int]:
        """Any case; returns the blocks that nobody holds any more, in order."""
        for block in block_ids:
            self._check_id(block)
        for block, times in Counter(block_ids).items():
            if block < self._first:
                raise BlockPoolError(f"block_ids: block {block} is the null block, never freed")
            held = self.ref_count(block)
            if times > held:
                raise BlockPoolError(
                    f"block_ids: block {block} is freed {times} times and held {held} times"
                )
        let_go: list[int] = []
        for block in block_ids:
            more = self._more.get(block, 0)
            if more == 0:
                self._held.remove(block)
                let_go.append(block)
            elif more == 1:
                del self._more[block]
            else:
                self._more[block] = more - 1
        return let_go

    def _evict_idle(self, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, bytes, int]]]:
        """Take the ``count`` oldest idle blocks out of the cache; the pool has as many.

        Returns the queue's entries that went, and ``(block, key, place)`` of each block.
        """
        popped: list[tuple[int, int]] = []
        blocks: list[int] = []
        idle, index, popleft = self._idle, self._index, self._queue.popleft
        pop = idle.pop
        while len(blocks) < count:
            entries = [popleft() for _ in range(count - len(blocks))]
            popped += entries
            for block, since in entries:
                idle_since = pop(block, None)
                if idle_since == since:
                    blocks.append(block)
                elif idle_since is not None:  # idle, but since later: it has another entry
                    idle[block] = idle_since
        keys = list(map(self._keys.pop, blocks))
        places: list[int] = [0] * count
        found = list(map(index.pop, keys, repeat(None)))
        if found != blocks:  # some keys have several blocks: one at a time after all
            index.update((key, each) for key, each in zip(keys, found) if each is not None)
            places = list(map(self._index_remove, keys, blocks))
        return popped, list(zip(blocks, keys, places))

    def _drop_old_entries(self) -> None:
        """Keep the queue within twice what counts; its cost is shared by the frees since."""
        if len(self._queue) > 2 * len(self._idle) + 64:
            idle = self._idle
            self._queue = deque(each for each in self._queue if idle.get(each[0]) == each[1])

    def _idle_order(self) -> list[int]:
        return [block for block, since in self._queue if self._idle.get(block) == since]

    def _index_insert(self, key: bytes, block: int, place: int | None) -> None:
        """Add a block under a key, at the end or at the place it had before."""
        found = self._index.get(key)
        if found is None:
            self._index[key] = block
        else:
            blocks = [found] if isinstance(found, int) else found
            blocks.insert(len(blocks) if place is None else place, block)
            self._index[key] = blocks

    def _index_remove(self, key: bytes, block: int) -> int:
        """Take a block out; returns its place among the blocks of that key."""
        found = self._index[key]
        if isinstance(found, int):
            del self._index[key]
            return 0
        place = found.index(block)
        del found[place]
        if len(found) == 1:
            self._index[key] = found[0]
        return place

    # Undo steps run in the reverse order of the changes, so each finds the state it left.

    def _undo_allocate(
        self,
        ids: list[int],
        stacked: int,
        fresh: int,
        popped: list[tuple[int, int]],
        evicted: list[tuple[int, bytes, int]],
    ) -> None:
        if ids and self._whole.pop(ids[0], None) is None:  # it was settled since
            self._held.difference_update(ids)
        for block, key, place in reversed(evicted):
            self._keys[block] = key
            self._index_insert(key, block, place)
        gone = {block for block, _, _ in evicted}
        # an entry that no longer counted may count again once an earlier touch is undone
        self._idle.update({block: since for block, since in popped if block in gone})
        self._queue.extendleft(reversed(popped))
        self._fresh -= fresh
        self._stack += reversed(ids[:stacked])

    def _undo_touch(self, block_ids: tuple[int, ...], woken: list[tuple[int, int]]) -> None:
        first_holds = {block for block, _ in woken}
        for block in block_ids:
            if block in first_holds:
                first_holds.remove(block)
                continue
            if self._more[block] == 1:
                del self._more[block]
            else:
                self._more[block] -= 1
        for block, since in woken:
            self._held.remove(block)
            self._idle[block] = since

    def _undo_free(self, block_ids: Sequence[int], stacked: int, last: list[int]) -> None:
        for block in last:
            self._queue.pop()
            del self._idle[block]
        if stacked:
            del self._stack[-stacked:]
        for block in block_ids:
            if block in self._held:
                self._more[block] = self._more.get(block, 0) + 1
            else:
                self._held.add(block)

    def _undo_publish(self, new: dict[int, bytes]) -> None:
        for block, key in reversed(new.items()):
            del self._keys[block]
            self._index_remove(key, block)

    def _undo_unpublish(self, gone: list[tuple[int, bytes, int, int | None]]) -> None:
        for block, key, place, since in reversed(gone):
            self._keys[block] = key
            self._index_insert(key, block, place)
            if since is not None:
                self._idle[block] = since
                self._stack.pop()


class _Transaction(AbstractContextManager[None]):
    """What ``BlockPool.transaction`` hands out; a class, as it is entered in every call."""

    __slots__ = ("_pool",)

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool._begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pool._end(undo=error is not None)
