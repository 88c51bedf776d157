"""A million operations on the block manager, watched by a model: ``python -m bench.soak``.

Requests of several rows are admitted, published, forked, rewritten, grown, evicted, failed and
freed in random order, by one seed, over a pool that is nearly always full. A model remembers
what every block of every row must hold; a hit on wrong content, a missed copy, a block owned
twice or lost ends the run with exit status 1 and the number of the operation.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from block_manager import (
    DiffusionKVAdmissionError,
    DiffusionKVCacheManager,
    DiffusionKVMetadata,
    DiffusionKVRequest,
    DiffusionKVUpdate,
    RowTable,
    TransferError,
)
from layout_core import FullAttentionSpec, KVCacheGroupSpec
from layout_core.resolve import make_config
from layout_core.rows import NULL_BLOCK_ID, PagedAttentionRow

SIZES = (4, 8)
MAX_LEN = 512
PROMPTS = 12

Content = tuple[object, ...]


class SoakError(Exception):
    """The manager and the model disagree."""


@dataclass
class Live:
    """An admitted request, and what each block of each row and group must hold."""

    rows: list[DiffusionKVRequest]
    expected: list[list[list[Content | None]]]  # row, group, entry; None where evicted
    failed: bool = False


@dataclass
class Soak:
    """The manager, its workers' row table, and the model that watches them."""

    seed: int
    num_blocks: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        groups = [
            KVCacheGroupSpec(
                [f"layer.{index}"],
                FullAttentionSpec(
                    block_size=size,
                    num_kv_heads=max(SIZES) // size,
                    head_size=8,
                    dtype="float16",  # type: ignore[arg-type]
                ),
            )
            for index, size in enumerate(SIZES)
        ]
        config = make_config(groups, self.num_blocks, "BLNHC")
        self.manager = DiffusionKVCacheManager(
            config,
            max_model_len=MAX_LEN,
            scheduler_block_size=max(SIZES),
            hash_block_size=min(SIZES),
            enable_prefix_caching=True,
        )
        self.table = RowTable(config, max_model_len=MAX_LEN)
        self.live: dict[str, Live] = {}
        self.content: dict[int, Content] = {}  # what each block holds
        self.serial = 0

    # -- the model ----------------------------------------------------------------------

    def prefix_content(self, row: DiffusionKVRequest, group: int, entry: int) -> Content:
        """What a full prefix block holds: a function of all tokens up to its end."""
        tokens = row.cache_token_ids[: (entry + 1) * SIZES[group]]
        return ("prefix", group, hash(tokens))

    def is_prefix(self, row: DiffusionKVRequest, group: int, entry: int) -> bool:
        return (entry + 1) * SIZES[group] <= row.prefix_len

    def write(self, name: str, metadata: DiffusionKVMetadata, starts: list[int]) -> None:
        """Write every position from ``starts`` on, row by row."""
        live = self.live[name]
        for index, (sequence, row) in enumerate(zip(metadata.sequences, live.rows)):
            for group, size in enumerate(SIZES):
                expected = live.expected[index][group]
                table = sequence.block_ids[group]
                expected.extend([None] * (len(table) - len(expected)))
                for entry in range(starts[index] // size, len(table)):
                    if table[entry] == NULL_BLOCK_ID:
                        continue
                    partial = starts[index] > entry * size
                    if partial and self.content.get(table[entry]) != expected[entry]:
                        raise SoakError(
                            f"{name}: row {index}, group {group}, entry {entry}, block "
                            f"{table[entry]}: what stands before the write is not the row's"
                        )
                    if self.is_prefix(row, group, entry):
                        value = self.prefix_content(row, group, entry)
                    else:
                        self.serial += 1
                        value = ("own", self.serial)
                    self.content[table[entry]] = expected[entry] = value

    def compare(self, name: str) -> None:
        """Every block of a request holds what the model says, and workers see the same."""
        live = self.live[name]
        if live.failed:
            return
        for sequence, expected in zip(self.manager.get_metadata(name).sequences, live.expected):
            row = PagedAttentionRow(
                name,
                0,
                sequence.seq_len,
                kv_start_pos=sequence.seq_len,
                first_key=sequence.first_key,
                sequence_id=sequence.sequence_id,
            )
            for group, table in enumerate(sequence.block_ids):
                if list(self.table.block_ids(row, group)) != table:
                    raise SoakError(f"{name}: the row table differs in group {group}")
                for entry, block in enumerate(table):
                    wanted = expected[group][entry]
                    if block == NULL_BLOCK_ID:
                        continue
                    if self.content[block] != wanted:
                        raise SoakError(
                            f"{name}: group {group}, entry {entry}, block {block} holds "
                            f"{self.content[block]}, expected {wanted}"
                        )

    def apply(self, name: str, update: DiffusionKVUpdate) -> None:
        for pairs in update.copies:
            for source, target in pairs:
                self.content[target] = self.content[source]
        self.table.replace(update.metadata)

    # -- operations ---------------------------------------------------------------------

    def pick(self) -> str | None:
        return self.random.choice(list(self.live)) if self.live else None

    def reserve(self) -> None:
        self.serial += 1
        name = f"request-{self.serial}"
        rows = []
        for index in range(self.random.choice((1, 2, 2, 3))):
            prompt = self.random.randrange(PROMPTS)
            length = self.random.randrange(1, 60)
            tokens = [*range(1000 * prompt, 1000 * prompt + length), -self.random.randrange(3)]
            target = self.random.randrange(1, 20)
            rows.append(
                DiffusionKVRequest(
                    f"{name}/{index}",
                    sequence_id=index,
                    prefix_len=len(tokens),
                    target_len=target,
                    seq_len=len(tokens) + target,
                    cache_token_ids=tokens,
                )
            )
        free = self.manager.num_free_blocks
        metadata = self.manager.reserve_request(name, rows)
        if metadata is None:
            if self.manager.required_blocks(rows) <= free:
                raise SoakError(f"{name}: refused with {free} free blocks")
            self.counts["refused: not now"] += 1
            self.free()
            return
        self.live[name] = Live(rows, [[[] for _ in SIZES] for _ in rows])
        for index, sequence in enumerate(metadata.sequences):
            for group, size in enumerate(SIZES):
                self.live[name].expected[index][group] = [
                    self.prefix_content(rows[index], group, entry)
                    for entry in range(sequence.cached_prefix_len // size)
                ]
        self.table.install(metadata, num_sequences=len(rows))
        self.write(name, metadata, [s.cached_prefix_len for s in metadata.sequences])
        self.compare(name)

    def publish(self) -> None:
        name = self.pick()
        if name is None:
            return
        try:
            self.manager.publish_request(name)
        except TransferError:
            if not self.live[name].failed:
                raise

    def free(self) -> None:
        name = self.pick()
        if name is None:
            return
        self.compare(name)
        del self.live[name]
        if not self.manager.free_request(name) or self.manager.free_request(name):
            raise SoakError(f"{name}: was not freed exactly once")
        self.table.remove([name])

    def fork(self) -> None:
        name = self.pick()
        if name is None or self.live[name].failed:
            return
        self.serial += 1
        child = f"fork-{self.serial}"
        free = self.manager.num_free_blocks
        self.table.install(self.manager.fork_request(name, child))
        if self.manager.num_free_blocks != free:
            raise SoakError(f"{child}: a fork took blocks")
        parent = self.live[name]
        self.live[child] = Live(
            list(parent.rows), [[list(group) for group in row] for row in parent.expected]
        )

    def rewrite(self) -> None:
        """A denoise step: the targets are written anew."""
        name = self.pick()
        if name is None or self.live[name].failed:
            return
        update = self.manager.make_writable(name)
        if update is None:
            self.counts["refused: not now"] += 1
            return
        self.apply(name, update)
        self.write(name, update.metadata, [s.prefix_len for s in update.metadata.sequences])

    def grow(self) -> None:
        """The next frame: the target joins the prefix."""
        name = self.pick()
        if name is None or self.live[name].failed:
            return
        rows = []
        for old in self.live[name].rows:
            tokens = (*old.cache_token_ids[: old.prefix_len], *range(9000, 9000 + old.target_len))
            rows.append(
                DiffusionKVRequest(
                    f"{name}/{old.sequence_id}",
                    sequence_id=old.sequence_id,
                    prefix_len=len(tokens),
                    target_len=6,
                    seq_len=len(tokens) + 6,
                    cache_token_ids=tokens,
                )
            )
        starts = {row.sequence_id: row.prefix_len for row in self.live[name].rows}
        try:
            update = self.manager.advance_request(
                name,
                rows,
                {row.sequence_id: (starts[row.sequence_id], row.seq_len) for row in rows},
            )
        except DiffusionKVAdmissionError:
            self.counts["refused: never"] += 1
            return
        if update is None:
            self.counts["refused: not now"] += 1
            return
        self.live[name].rows = rows
        self.apply(name, update)
        self.write(name, update.metadata, list(starts.values()))

    def evict(self) -> None:
        name = self.pick()
        if name is None or self.live[name].failed:
            return
        firsts = {
            row.sequence_id: row.prefix_len * self.random.randrange(4) // 6
            for row in self.live[name].rows
        }
        self.table.replace(self.manager.evict_before(name, firsts))

    def fail(self) -> None:
        name = self.pick()
        if name is None or self.random.random() > 0.05:
            return
        tables = self.manager.get_metadata(name).sequences[0].block_ids
        own = [block for block in tables[0] if block != NULL_BLOCK_ID]
        block = self.random.choice(own)
        for each in self.manager.fail_transfer(name, [block]):
            self.live[each].failed = True
        self.serial += 1
        self.content[block] = ("garbage", self.serial)

    def reset(self) -> None:
        if self.random.random() < 0.01:
            self.manager.reset_prefix_cache()

    def operation(self) -> None:
        """One random operation."""
        (work,) = self.random.choices(
            (
                self.reserve,
                self.publish,
                self.free,
                self.fork,
                self.rewrite,
                self.grow,
                self.evict,
                self.fail,
                self.reset,
            ),
            (24, 20, 16, 6, 18, 6, 5, 2, 1),
        )
        self.counts[work.__name__] += 1
        work()

    def check(self) -> None:
        """Every invariant, for every block and every request."""
        self.manager.check()
        for name in self.live:
            self.compare(name)

    def finish(self) -> None:
        """Free everything; the pool must be whole again."""
        for name in list(self.live):
            self.manager.free_request(name)
            self.table.remove([name])
        self.live.clear()
        self.manager.check()
        pool = self.manager.block_pool
        if pool.num_free_blocks != pool.num_usable_blocks or self.table.num_rows:
            raise SoakError(f"{pool.num_usable_blocks - pool.num_free_blocks} blocks are lost")


def run(operations: int, seed: int, num_blocks: int, check_every: int, console: Console) -> int:
    """Run the soak; returns the exit status."""
    soak = Soak(seed, num_blocks)
    started = time.perf_counter()
    step = 0
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("soak", total=operations)
            for step in range(1, operations + 1):
                soak.operation()
                if step % check_every == 0:
                    soak.check()
                    progress.update(task, completed=step)
            progress.update(task, completed=operations)
        soak.check()
        alive = len(soak.live)
        soak.finish()
    except (SoakError, ValueError) as error:
        console.print(f"[red]operation {step}, seed {seed}: {error}")
        return 1
    seconds = time.perf_counter() - started
    stats = soak.manager.stats
    table = Table(title=f"{operations:,} operations, seed {seed}, {num_blocks:,} blocks: no fault")
    table.add_column("what")
    table.add_column("how many", justify="right")
    for kind, count in sorted(soak.counts.items()):
        table.add_row(kind, f"{count:,}")
    table.add_row("prefix tokens looked up", f"{stats.tokens:,}")
    table.add_row("prefix tokens found", f"{stats.hit_tokens:,}")
    table.add_row("requests alive at the end", f"{alive:,}")
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("operations a second", f"{operations / seconds:,.0f}")
    console.print(table)
    return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--check-every", type=int, default=2_000)
    options = parser.parse_args()
    return run(
        options.operations, options.seed, options.blocks, options.check_every, Console(width=100)
    )


if __name__ == "__main__":
    sys.exit(main())
