"""The same requests against vLLM's ``KVCacheManager``, and the same calls against its pool."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool as TheirPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from block_manager.block_pool import BlockPool
from block_manager.cache_manager import DiffusionKVCacheManager
from block_manager.requests import DiffusionKVRequest
from layout_core import (
    DiffusionKVAdmissionError,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from tests.conformance import peers
from tests.conformance.cases import rarely
from tests.conformance.judge import ours, refusal, theirs
from tests.conformance.tally import BOTH_REFUSE, EQUAL, Disagreement, Tally

MAX_MODEL_LEN = 1 << 20
TARGET_TOKENS = 10**6
"""Token ids from here on are those of targets: no two rows share one, so none is ever a hit."""


@dataclass(frozen=True)
class RowCase:
    """``prefix`` tokens of a stream that other rows share, then ``target`` tokens of its own."""

    stream: int
    prefix: int
    target: int


@dataclass(frozen=True)
class ManagerCase:
    """A sequence of calls: reserve (rows), publish, free, by index of the request."""

    block_sizes: tuple[int, ...]  # one for each group
    num_blocks: int
    caching: bool
    calls: tuple[tuple[str, int, tuple[RowCase, ...]], ...]


@st.composite
def manager_cases(draw: st.DrawFn) -> ManagerCase:
    block_sizes = draw(st.sampled_from(((4,), (4,), (16,), (1,), (4, 8), (4, 4), (2, 4, 4))))
    longest = 12 * max(block_sizes)
    calls: list[tuple[str, int, tuple[RowCase, ...]]] = []
    requests = 0
    for _ in range(draw(st.integers(2, 24))):
        call = draw(st.sampled_from(("reserve", "reserve", "publish", "free")))
        if call == "reserve" or requests == 0:
            rows = tuple(
                RowCase(
                    draw(st.integers(0, 2)),
                    draw(st.integers(0, longest)),
                    draw(st.integers(1, max(block_sizes) * 3)),
                )
                for _ in range(draw(st.sampled_from((1, 1, 2))))
            )
            calls.append(("reserve", requests, rows))
            if not rarely(draw, 3):
                calls.append(("publish", requests, ()))
            requests += 1
        else:
            calls.append((call, draw(st.integers(0, requests - 1)), ()))
    return ManagerCase(
        block_sizes=block_sizes,
        num_blocks=draw(st.sampled_from((20, 12, 5, 40, 100, 2))) * len(block_sizes),
        caching=not rarely(draw, 4),
        calls=tuple(calls),
    )


class Theirs:
    """vLLM's manager driven as a diffusion scheduler drives it: all rows or none."""

    def __init__(self, case: ManagerCase) -> None:
        specs = [
            peers.interface.FullAttentionSpec(
                block_size=size, num_kv_heads=1, head_size=1 + at, dtype=peers.torch.float16
            )
            for at, size in enumerate(case.block_sizes)
        ]
        groups = [peers.group_spec([f"l{at}"], spec) for at, spec in enumerate(specs)]
        config = peers.interface.KVCacheConfig(case.num_blocks, [], groups)
        self.hash_block_size = gcd(*case.block_sizes)
        self.manager: Any = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=lcm(*case.block_sizes),
            hash_block_size=self.hash_block_size,
            enable_caching=case.caching,
        )
        self.block_sizes = case.block_sizes
        self.requests: dict[int, list[tuple[Any, int]]] = {}
        self.hasher = peers.utils.get_request_block_hasher(self.hash_block_size, sha256)

    @property
    def free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def reserve(self, index: int, rows: tuple[RowCase, ...]) -> list[int] | None:
        """Hit tokens of each row, or ``None`` where the manager has too few blocks."""
        made = []
        for at, row in enumerate(rows):
            request = Request(
                f"{index}/{at}",
                tokens_of(index, at, row),
                SamplingParams(max_tokens=1),
                None,
                block_hasher=self.hasher,
            )
            blocks, hit = self.manager.get_computed_blocks(request)[:2]
            made.append((request, row, blocks, hit))
        pool = self.manager.block_pool
        held = [block for _, _, blocks, _ in made for group in blocks.blocks for block in group]
        if len(made) > 1:
            # vLLM's manager knows single sequences: what its own check would add up to
            idle = len({block.block_id for block in held if block.ref_cnt == 0})
            new = sum(
                -(-len(request.prompt_token_ids) // size) - len(group)
                for request, _, blocks, _ in made
                for size, group in zip(self.block_sizes, blocks.blocks)
            )
            if new + idle > pool.get_num_free_blocks():
                return None
            pool.touch(held)  # or one row's new blocks would evict another's hit
        for request, _, blocks, hit in made:
            slots = self.manager.allocate_slots(
                request,
                request.num_tokens - hit,
                num_new_computed_tokens=hit,
                new_computed_blocks=blocks,
                delay_cache_blocks=True,
            )
            if slots is None:
                if len(made) > 1:
                    raise Disagreement("vLLM refused one row of a request that fits")
                return None
        if len(made) > 1:
            pool.free_blocks(held)
        self.requests[index] = [(request, row.prefix) for request, row, _, _ in made]
        return [hit for _, _, _, hit in made]

    def publish(self, index: int) -> None:
        for request, prefix in self.requests.get(index, ()):
            self.manager.cache_blocks(request, prefix)

    def free(self, index: int) -> None:
        for request, _ in reversed(self.requests.pop(index, [])):
            self.manager.free(request)


def tokens_of(index: int, at: int, row: RowCase) -> list[int]:
    """Prefix tokens of the stream, then target tokens that no other row has."""
    start = TARGET_TOKENS + (index * 8 + at) * 100_000
    return [
        *(row.stream * 10_000 + position for position in range(row.prefix)),
        *range(start, start + row.target),
    ]


class Ours:
    """Our manager behind the same calls."""

    def __init__(self, case: ManagerCase) -> None:
        groups = [
            KVCacheGroupSpec(
                [f"l{at}"],
                FullAttentionSpec(size, num_kv_heads=1, head_size=1 + at, dtype="float16"),  # type: ignore[arg-type]
            )
            for at, size in enumerate(case.block_sizes)
        ]
        self.manager = DiffusionKVCacheManager(
            KVCacheConfig(case.num_blocks, [], groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=lcm(*case.block_sizes),
            hash_block_size=gcd(*case.block_sizes),
            enable_prefix_caching=case.caching,
        )

    @property
    def free_blocks(self) -> int:
        return self.manager.num_free_blocks

    def reserve(self, index: int, rows: tuple[RowCase, ...]) -> list[int] | None:
        requests = [
            DiffusionKVRequest(
                f"{index}/{at}",
                sequence_id=at,
                prefix_len=row.prefix,
                target_len=row.target,
                seq_len=row.prefix + row.target,
                cache_token_ids=tokens_of(index, at, row),
            )
            for at, row in enumerate(rows)
        ]
        metadata = self.manager.reserve_request(str(index), requests)
        if metadata is None:
            return None
        return [sequence.cached_prefix_len for sequence in metadata.sequences]

    def publish(self, index: int) -> None:
        if self.manager.has_request(str(index)):
            self.manager.publish_request(str(index))

    def free(self, index: int) -> None:
        self.manager.free_request(str(index))


def compare_managers(case: ManagerCase, tally: Tally) -> str:
    """Hits, refusals and free blocks after every call, and an empty pool at the end."""
    mine, peer = Ours(case), Theirs(case)
    done: list[str] = []
    refused = hits = 0
    for call, index, rows in (*case.calls, *(("free", i, ()) for i in range(len(case.calls)))):
        done.append(f"{call} {index} {rows or ''}")
        if call == "reserve":
            try:
                got = mine.reserve(index, rows)
            except DiffusionKVAdmissionError:
                got = None
                tally.labels["never"] += 1
            want = peer.reserve(index, rows)
            refused += got is None
            hits += sum(got or ())
            if got != want:
                raise Disagreement(f"{case}\n  after {done}: ours hits {got}, vLLM {want}")
        else:
            getattr(mine, call)(index)
            getattr(peer, call)(index)
        if mine.free_blocks != peer.free_blocks:
            raise Disagreement(
                f"{case}\n  after {done}: ours has {mine.free_blocks} free blocks, vLLM "
                f"{peer.free_blocks}"
            )
    mine.manager.check()
    tally.labels["caching" if case.caching else "no caching"] += 1
    tally.labels["several groups" if len(case.block_sizes) > 1 else "one group"] += 1
    tally.labels["with hits"] += hits > 0
    tally.labels["with refusals"] += refused > 0
    return EQUAL


# The pool alone.


@dataclass(frozen=True)
class PoolCase:
    """Calls on a pool: ``("allocate", n)``; ``free`` or ``touch`` of the ``n``-th block held."""

    num_blocks: int
    calls: tuple[tuple[str, int], ...]


@st.composite
def pool_cases(draw: st.DrawFn) -> PoolCase:
    call = st.tuples(
        st.sampled_from(("allocate", "allocate", "free", "free", "touch", "free again")),
        st.integers(0, 12),
    )
    return PoolCase(
        num_blocks=draw(st.sampled_from((8, 2, 3, 20, 64))),
        calls=tuple(draw(st.lists(call, min_size=1, max_size=30))),
    )


def compare_pools(case: PoolCase, tally: Tally) -> str:
    """Free counts and reference counts after every call; refusals of both."""
    mine = BlockPool(case.num_blocks)
    peer = TheirPool(case.num_blocks, enable_caching=False, hash_block_size=16)
    held: list[tuple[int, int]] = []  # our block and theirs, once for each hold
    freed: list[tuple[int, int]] = []
    outcome = EQUAL
    for call, number in case.calls:
        if call == "allocate":
            our = ours(lambda number=number: mine.allocate(number))
            their = theirs(lambda number=number: peer.get_new_blocks(number))
            if (our.error is None) != (their.error is None):
                raise Disagreement(f"{case}: allocate {number}: ours {our}, vLLM {their}")
            if our.error is not None:
                outcome = BOTH_REFUSE
                continue
            new = list(zip(our.value, (block.block_id for block in their.value), strict=True))
            held += new
            freed = [pair for pair in freed if pair[0] not in our.value]
        elif call == "free again":
            blocks = {pair[0] for pair in held}
            gone = [pair for pair in freed if pair[0] not in blocks]
            if not gone:
                continue
            block = gone[number % len(gone)][0]
            if ours(lambda block=block: mine.free([block])).error is None:
                raise Disagreement(f"{case}: we let block {block} be freed twice")
            tally.labels["freed twice"] += 1
            return refusal("double-free")
        elif held:
            pair = held[number % len(held)]
            if call == "free":
                mine.free([pair[0]])
                peer.free_blocks([peer.blocks[pair[1]]])
                held.remove(pair)
                freed.append(pair)
            else:
                mine.touch([pair[0]])
                peer.touch([peer.blocks[pair[1]]])
                held.append(pair)
        if mine.num_free_blocks != peer.get_num_free_blocks():
            raise Disagreement(
                f"{case}: ours has {mine.num_free_blocks} free, vLLM {peer.get_num_free_blocks()}"
            )
        for a, b in held:
            if mine.ref_count(a) != peer.blocks[b].ref_cnt:
                raise Disagreement(f"{case}: block {a} is held unequally often")
    return outcome


peers.utils.init_none_hash(sha256)
