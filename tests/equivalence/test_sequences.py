"""Long random runs of writes, block copies, forks and frees: equal bytes on both engines after.

The block manager says what is forked and what a first write copies; the bytes that must result
come from NumPy's axis order alone. Numbers are random bits, NaN payloads among them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np
import pytest

from block_manager import DiffusionKVCacheManager, DiffusionKVMetadata, DiffusionKVRequest
from layout_core.views import ResolvedLayout
from tests.cases import NUMPY_DTYPES, PoolShape, config_of, legal, plan_of, slots_of
from tests.engines.suite import ENGINE_KERNELS, shape_layer
from tests.equivalence.memory import Memory, memory_of
from tests.equivalence.test_bytes import CALL_TOKENS, STORED, hostile
from tests.tolerances import assert_same_bytes

OPERATIONS = 14
MOST_REQUESTS = 4

CASES = [
    pytest.param(shape, layout, STORED[at % len(STORED)], id=f"{shape.name}-{layout}")
    for at, (shape, layout) in enumerate(legal())
]


class Machine:
    """The engines' pools, the bytes that they must hold, and the manager that owns the blocks."""

    def __init__(
        self, engines: list[Any], shape: PoolShape, layout: str, dtype: str, seed: int
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.engines, self.shape, self.dtype = engines, shape, dtype
        self.plan: ResolvedLayout = plan_of(shape, layout, dtype)
        start = self.rng.integers(0, 256, self.plan.size_bytes, dtype=np.uint8)
        self.pools = [e.load_bytes(self.plan, start.tobytes()) for e in engines]
        self.memory: Memory = memory_of(shape, layout, NUMPY_DTYPES[dtype].itemsize)
        self.memory.data[:] = start
        sizes = [group.block_size for group in shape.groups]
        self.manager = DiffusionKVCacheManager(
            config_of(shape, layout, dtype),
            max_model_len=64,
            scheduler_block_size=lcm(*sizes),
            hash_block_size=min(sizes),
        )
        self.admitted: dict[str, DiffusionKVMetadata] = {}
        self.forked = self.copied = 0

    def step(self) -> None:
        """One operation, drawn from those that are possible."""
        possible = [self.admit, self.copy] if len(self.admitted) < MOST_REQUESTS else [self.copy]
        if self.admitted:
            possible += [self.write, self.write, self.write]
            possible += (
                [self.fork, self.fork] if len(self.admitted) < MOST_REQUESTS else [self.free]
            )
        possible[int(self.rng.integers(len(possible)))]()

    def _any(self) -> str:
        return sorted(self.admitted)[int(self.rng.integers(len(self.admitted)))]

    def admit(self) -> None:
        name = f"r{len(self.admitted)}-{self.rng.integers(1 << 30)}"
        prefix, target = (int(n) for n in self.rng.integers(1, 7, 2))
        row = DiffusionKVRequest(
            name, sequence_id=0, prefix_len=prefix, target_len=target, seq_len=prefix + target
        )
        metadata = self.manager.reserve_request(name, [row])
        if metadata is not None:
            self.admitted[name] = metadata

    def fork(self) -> None:
        child = f"fork-{self.rng.integers(1 << 30)}"
        self.admitted[child] = self.manager.fork_request(self._any(), child)
        self.forked += 1

    def free(self) -> None:
        name = self._any()
        self.manager.free_request(name)
        del self.admitted[name]

    def copy(self) -> None:
        """Pairs of a caller's own, in one group."""
        group = int(self.rng.integers(len(self.shape.groups)))
        ids = self.rng.permutation(np.arange(1, self.shape.num_blocks))[:5].tolist()
        self._copy([(ids[0], ids[1]), (ids[2], ids[3]), (ids[0], ids[4])], group)

    def write(self) -> None:
        """Tokens of one layer, after the copies that a forked request's first write asks for."""
        name = self._any()
        update = self.manager.make_writable(
            name, {0: (0, self.admitted[name].sequences[0].seq_len)}
        )
        if update is None:
            return
        self.admitted[name] = update.metadata
        for group, pairs in enumerate(update.copies):
            if pairs:
                self._copy(list(pairs), group)
        sequence = update.metadata.sequences[0]
        layer = int(self.rng.integers(len(self.plan.layers)))
        group, place = shape_layer(self.shape, layer)
        n, cells = self.shape.groups[group].block_size, self.shape.groups[group].layers[place]
        positions = self.rng.permutation(sequence.seq_len)[: int(self.rng.integers(1, 9))].tolist()
        slots = slots_of(sequence.block_ids[group], positions, n)
        slots += [-1] * (CALL_TOKENS - len(slots))
        key = hostile(self.rng, (CALL_TOKENS, cells.kv_heads, cells.head_size), self.dtype)
        value = hostile(self.rng, (CALL_TOKENS, cells.kv_heads, cells.value_size), self.dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                self.memory.put(layer, *divmod(slot, n), key[token], value[token])
        for at, e in enumerate(self.engines):
            self.pools[at] = e.write(
                self.pools[at],
                layer,
                e.from_numpy(key),
                e.from_numpy(value),
                e.from_numpy(np.asarray(slots, np.int32)),
            )

    def _copy(self, pairs: list[tuple[int, int]], group: int) -> None:
        for source, target in pairs:
            for layer in self.plan.group_layers(group):
                self.memory.copy_block(layer, source, target)
        for at, e in enumerate(self.engines):
            self.pools[at] = e.copy_blocks(self.pools[at], pairs, group=group)
        self.copied += len(pairs)


@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
def test_random_writes_copies_and_forks_give_equal_bytes(
    load_engine: Callable[[str], Any], shape: PoolShape, layout: str, dtype: str
) -> None:
    engines = [load_engine(name) for name, _ in ENGINE_KERNELS]
    for seed in range(2):
        machine = Machine(engines, shape, layout, dtype, seed)
        machine.admit()
        machine.fork()
        for _ in range(OPERATIONS):
            machine.step()
        machine.write()
        assert machine.forked
        assert machine.copied
        got = [e.pool_bytes(p) for e, p in zip(engines, machine.pools)]
        for e, data in zip(engines, got):
            where = f"{e.name} {shape.name} {layout} {dtype} seed {seed}"
            assert_same_bytes(data, machine.memory.data.tobytes(), where)
        assert_same_bytes(got[1], got[0], "one engine against the other")
