"""A stateful machine: the manager against a plain model that knows no pool.

The model keeps, for each row, what every position must read as. Writes go to a memory of
(block, offset) cells; so a block owned twice, a wrong hit, a missed copy or a block handed out
too early shows as a wrong value, not only as a wrong count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from block_manager import (
    BlockPool,
    DiffusionKVAdmissionError,
    DiffusionKVMetadata,
    DiffusionKVRequest,
    DiffusionKVUpdate,
    RowTable,
    TransferError,
)
from layout_core.rows import PagedAttentionRow
from tests.manager.helpers import Memory, config, manager

MAX_LEN = 64


class Planted(Exception):
    """A fault on purpose."""


@dataclass
class ModelRow:
    request: DiffusionKVRequest
    values: dict[int, object] = field(default_factory=dict)  # what each position must read as
    first_key: int = 0


@dataclass
class ModelRequest:
    rows: list[ModelRow]
    failed: bool = False


def prefix_value(request: DiffusionKVRequest, position: int) -> object:
    """K/V of a prefix position: a function of all tokens it sees, directly or not.

    Causal, but for full spans: then of everything up to the end of its span.
    """
    sees = position + 1
    for start, end in request.full_spans or ():
        if start <= position < end:
            sees = end
    spans = tuple(s for s in request.full_spans or () if s[0] < sees)
    return (request.cfg_branch, tuple(request.cache_token_ids[:sees]), spans)


class ManagerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        sizes=st.sampled_from([(4,), (2,), (4, 8), (8, 4, 2)]),
        num_blocks=st.integers(12, 100),
        caching=st.sampled_from([True, True, True, False]),
        clip=st.booleans(),
        null_block=st.sampled_from([True, True, False]),
    )
    def start(
        self, sizes: tuple[int, ...], num_blocks: int, caching: bool, clip: bool, null_block: bool
    ) -> None:
        options = {"null_block": null_block}
        self.sizes = sizes
        self.manager = manager(
            num_blocks,
            *sizes,
            enable_prefix_caching=caching,
            clip_hits_to_shortest=clip,
            max_model_len=MAX_LEN,
            **options,
        )
        self.table = RowTable(config(num_blocks, *sizes), max_model_len=MAX_LEN, **options)
        self.usable = num_blocks - (1 if null_block else 0)
        self.caching = caching
        self.null_block = null_block
        self.memory = Memory()
        self.model: dict[str, ModelRequest] = {}
        self.counter = 0

    # -- helpers ------------------------------------------------------------------------

    def held(self) -> set[int]:
        """Blocks that rows own, from the payloads alone."""
        return {
            block
            for name in self.model
            for sequence in self.manager.get_metadata(name).sequences
            for table in sequence.block_ids
            for block in table
            if block != 0 or not self.null_block
        }

    def write(self, name: str, index: int, position: int, value: object) -> None:
        sequence = self.manager.get_metadata(name).sequences[index]
        for table, size in zip(sequence.block_ids, self.sizes):
            self.memory.write(table, size, position, value)
        self.model[name].rows[index].values[position] = value

    def apply(self, update: DiffusionKVUpdate) -> None:
        for pairs, size in zip(update.copies, self.sizes):
            self.memory.copy_blocks(pairs, size)
        self.table.replace(update.metadata)

    def compute(self, name: str, metadata: DiffusionKVMetadata) -> None:
        """Step 0: write every position that no hit covers; hits must hold the right values."""
        for index, sequence in enumerate(metadata.sequences):
            row = self.model[name].rows[index]
            for position in range(row.first_key, sequence.cached_prefix_len):
                value = prefix_value(row.request, position)
                for table, size in zip(sequence.block_ids, self.sizes):
                    assert self.memory.read(table, size, position) == value
                row.values[position] = value
            for position in range(sequence.cached_prefix_len, sequence.seq_len):
                if position < sequence.prefix_len:
                    value = prefix_value(row.request, position)
                else:
                    value = (name, index, position, self.counter)
                self.write(name, index, position, value)

    # -- rules --------------------------------------------------------------------------

    @rule(
        target=requests,
        prompts=st.lists(
            st.tuples(
                st.sampled_from([9, 12, 16, 20]),  # how much of the one prompt
                st.sampled_from([0, 5, 8, 9, 13, 99, 99, 99]),  # where one token differs
                st.integers(1, 9),  # target
                st.sampled_from([None, ((4, 10),), ((4, 10),), ((1, 6), (7, 15))]),  # spans
            ),
            min_size=1,
            max_size=3,
        ),
        branch=st.sampled_from([None, None, 1]),
    )
    def reserve(
        self,
        prompts: list[tuple[int, int, int, tuple[tuple[int, int], ...] | None]],
        branch: int | None,
    ) -> object:
        self.counter += 1
        name = f"r{self.counter}"
        rows = []
        for index, (length, other, target, spans) in enumerate(prompts):
            tokens = list(range(length))
            if other < length:
                tokens[other] = 900
            if spans is not None:
                spans = tuple(span for span in spans if span[1] <= length)
            rows.append(
                DiffusionKVRequest(
                    f"{name}/{index}",
                    sequence_id=index,
                    prefix_len=len(tokens),
                    target_len=target,
                    seq_len=len(tokens) + target,
                    cache_token_ids=tuple(tokens),
                    full_spans=spans,
                    cfg_branch=branch,
                )
            )
        free = self.usable - len(self.held())
        most = self.manager.required_blocks(rows)
        before = self.manager.state()
        try:
            metadata = self.manager.reserve_request(name, rows)
        except DiffusionKVAdmissionError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.required_blocks is not None
            assert self.usable < refusal.required_blocks <= most
            assert self.manager.state() == before
            return multiple()
        if metadata is None:
            assert most > free
            assert self.manager.state() == before
            return multiple()
        self.model[name] = ModelRequest([ModelRow(row) for row in rows])
        assert free - (self.usable - len(self.held())) <= min(most, free)
        if not self.caching:
            assert [s.cached_prefix_len for s in metadata.sequences] == [0] * len(rows)
            assert self.usable - len(self.held()) == free - most
        self.table.install(metadata, num_sequences=len(rows))
        self.compute(name, metadata)
        return name

    @rule(name=requests)
    def publish(self, name: str) -> None:
        if name not in self.model:
            return
        if self.model[name].failed:
            before = self.manager.state()
            try:
                self.manager.publish_request(name)
            except TransferError:
                assert self.manager.state() == before
                return
            raise AssertionError("a failed request was published")
        published = self.manager.publish_request(name)
        assert published == 0 or self.caching
        assert self.manager.publish_request(name) == 0

    @rule(name=consumes(requests))
    def free(self, name: str) -> None:
        known = self.model.pop(name, None) is not None
        rows = self.table.num_rows
        assert self.manager.free_request(name) is known
        assert (self.table.remove([name]) > 0) is known
        assert (self.table.num_rows < rows) is known
        assert self.manager.free_request(name) is False

    @rule(target=requests, name=requests)
    def fork(self, name: str) -> object:
        if name not in self.model or self.model[name].failed:
            return multiple()
        self.counter += 1
        child = f"f{self.counter}"
        free = self.manager.num_free_blocks
        metadata = self.manager.fork_request(name, child)
        assert self.manager.num_free_blocks == free
        self.model[child] = ModelRequest(
            [
                ModelRow(row.request, dict(row.values), row.first_key)
                for row in self.model[name].rows
            ]
        )
        self.table.install(metadata)
        return child

    @rule(name=requests)
    def write_targets(self, name: str) -> None:
        if name not in self.model or self.model[name].failed:
            return
        before = self.manager.state()
        update = self.manager.make_writable(name)
        if update is None:
            assert self.manager.state() == before
            return
        self.apply(update)
        self.counter += 1
        for index, sequence in enumerate(update.metadata.sequences):
            for position in range(sequence.prefix_len, sequence.seq_len):
                self.write(name, index, position, (name, index, position, self.counter))

    @rule(name=requests, more=st.integers(1, 7))
    def advance(self, name: str, more: int) -> None:
        if name not in self.model or self.model[name].failed:
            return
        request = self.model[name]
        rows = []
        for model in request.rows:
            old = model.request
            tokens = [*old.cache_token_ids[: old.prefix_len], *range(500, 500 + old.target_len)]
            rows.append(
                DiffusionKVRequest(
                    self._row_id(name, old.sequence_id),
                    sequence_id=old.sequence_id,
                    prefix_len=len(tokens),
                    target_len=more,
                    seq_len=max(len(tokens) + more, old.seq_len),
                    cache_token_ids=tuple(tokens),
                    full_spans=old.full_spans,
                    cfg_branch=old.cfg_branch,
                )
            )
        # the finished target is computed again, cleanly: it is a prefix from now on
        writes = {
            row.sequence_id: (model.request.prefix_len, row.seq_len)
            for row, model in zip(rows, request.rows)
        }
        before = self.manager.state()
        try:
            update = self.manager.advance_request(name, rows, writes)
        except DiffusionKVAdmissionError:
            assert self.manager.state() == before
            return
        if update is None:
            assert self.manager.state() == before
            return
        self.apply(update)
        self.counter += 1
        for index, (model, new) in enumerate(zip(request.rows, rows)):
            start = model.request.prefix_len
            model.request = new
            for position in range(start, new.seq_len):
                value: object = (name, index, position, self.counter)
                if position < new.prefix_len:
                    value = prefix_value(new, position)
                self.write(name, index, position, value)

    def _row_id(self, name: str, sequence_id: int) -> str:
        return f"{name}/{sequence_id}"

    @precondition(lambda self: self.null_block)
    @rule(name=requests, fraction=st.integers(0, 4))
    def evict(self, name: str, fraction: int) -> None:
        if name not in self.model:
            return
        firsts = {}
        for model in self.model[name].rows:
            first = max(model.first_key, model.request.prefix_len * fraction // 4)
            firsts[model.request.sequence_id] = model.first_key = first
            model.values = {p: v for p, v in model.values.items() if p >= first}
        metadata = self.manager.evict_before(name, firsts)
        if not self.model[name].failed:
            self.table.replace(metadata)

    @rule(name=requests, pick=st.integers(0, 100))
    def fail_transfer(self, name: str, pick: int) -> None:
        if name not in self.model or pick % 5:
            return
        own = sorted(
            {
                block
                for s in self.manager.get_metadata(name).sequences
                for table in s.block_ids
                for block in table
                if block != 0 or not self.null_block
            }
        )
        block = own[pick % len(own)]
        failed = self.manager.fail_transfer(name, [block])
        self.memory.cells.update({(block, offset): "garbage" for offset in range(max(self.sizes))})
        assert failed[0] == name
        for each in failed:
            self.model[each].failed = True

    @rule(name=requests, nth=st.integers(1, 6))
    def fail_halfway(self, name: str, nth: int) -> None:
        """The nth call into the pool fails, whatever is being done."""
        if name not in self.model or self.model[name].failed:
            return
        real = {each: getattr(BlockPool, each) for each in ("allocate", "touch", "free", "publish")}
        calls = 0

        def wrap(each: str) -> object:
            def failing(pool: BlockPool, *args: object, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == nth:
                    raise Planted
                return real[each](pool, *args, **kwargs)

            return failing

        before = self.manager.state()
        try:
            for each in real:
                setattr(BlockPool, each, wrap(each))
            again = [
                replace(row.request, request_id=f"never/{row.request.sequence_id}")
                for row in self.model[name].rows
            ]
            for change in (
                lambda: self.manager.reserve_request("never", again),
                lambda: self.manager.free_request("never"),
                lambda: self.manager.fork_request(name, "never"),
                lambda: self.manager.make_writable("never"),
                lambda: self.manager.free_request("never"),
                lambda: self.manager.free_request("never"),
            ):
                state = self.manager.state()
                try:
                    change()
                except Planted:
                    assert self.manager.state() == state
                    break
                except (KeyError, DiffusionKVAdmissionError):
                    break
        finally:
            for each, function in real.items():
                setattr(BlockPool, each, function)
        if self.manager.free_request("never"):
            return
        # nothing but the order of free blocks may differ after what came and went
        assert self.manager.state()[0] == before[0]

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    # -- invariants ---------------------------------------------------------------------

    @invariant()
    def counts_are_right(self) -> None:
        self.manager.check()
        held = self.held()
        assert self.manager.num_free_blocks == self.usable - len(held)
        counts: dict[int, int] = {}
        for name in self.model:
            for sequence in self.manager.get_metadata(name).sequences:
                for table in sequence.block_ids:
                    for block in table:
                        counts[block] = counts.get(block, 0) + 1
        for block in held:
            assert self.manager.block_pool.ref_count(block) == counts[block]

    @invariant()
    def every_row_reads_what_was_written(self) -> None:
        for name, request in self.model.items():
            if request.failed:
                continue
            metadata = self.manager.get_metadata(name)
            for sequence, model in zip(metadata.sequences, request.rows):
                assert sequence.first_key == model.first_key
                for group, size in enumerate(self.sizes):
                    ids = self.table.block_ids(
                        PagedAttentionRow(
                            name,
                            0,
                            sequence.seq_len,
                            kv_start_pos=sequence.seq_len,
                            first_key=model.first_key,
                            sequence_id=sequence.sequence_id,
                        ),
                        group,
                    )
                    assert list(ids) == sequence.block_ids[group]
                    for position, value in model.values.items():
                        assert self.memory.read(list(ids), size, position) == value

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.close()
        self.manager.check()
        assert self.manager.num_free_blocks == self.usable


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
