"""Allocations of vLLM-Omni's scheduler in our row table, and ours in its worker."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from vllm_omni.diffusion.diffusion_kv.manager import DiffusionKVCacheManager

from block_manager import DiffusionKVCacheManager as OurManager
from block_manager import DiffusionKVRequest, RowTable
from layout_core import LayoutError, PagedAttentionRow
from layout_core.foreign import as_config
from tests.integrations.vllm_omni import peers

SHAPE = peers.Shape()
REFUSALS = (ValueError, RuntimeError, KeyError)


def new_worker() -> tuple[peers.Worker, DiffusionKVCacheManager, Any]:
    worker = peers.Worker(SHAPE, "FLASH_ATTN")
    configs, scheduler, manager = peers.control_plane(worker, 40)
    worker.allocate(configs[0], "FLASH_ATTN")
    return worker, manager, scheduler


def blocks_of(worker: peers.Worker, metadata: Any) -> dict[tuple[str, int], list[int]]:
    """What vLLM-Omni's worker has installed, by row."""
    adapter = worker.backend.get_paged_attention_adapter()
    return {
        (metadata.request_id, s.sequence_id): list(
            adapter.resolve_row(metadata.request_id, s.sequence_id, None).block_ids[0]
        )
        for s in metadata.sequences
    }


def our_blocks(table: RowTable, metadata: Any) -> dict[tuple[str, int], list[int]]:
    return {
        (metadata.request_id, s.sequence_id): list(
            table.block_ids(
                PagedAttentionRow(metadata.request_id, 0, s.seq_len, sequence_id=s.sequence_id), 0
            )
        )
        for s in metadata.sequences
    }


def test_both_worker_sides_take_and_refuse_the_same_payloads() -> None:
    worker, manager, scheduler = new_worker()
    table = RowTable(as_config(scheduler), max_model_len=SHAPE.max_model_len)
    rng = random.Random(0)
    live: dict[str, Any] = {}
    refused = 0
    for number in range(150):
        if live and rng.random() < 0.45:
            name = rng.choice(sorted(live))
            gone = live.pop(name)
            manager.free_request(name)
            generation = (name, gone.allocation_generation - rng.choice((0, 0, 1)))
            removed = worker.backend.remove_diffusion_kv_requests([generation])
            assert table.remove([generation]) == removed
            if not removed:  # it was a stale removal
                assert table.remove([name]) == worker.backend.remove_diffusion_kv_requests([name])
            continue
        name = f"r{number}"
        rows = [
            peers.request(name, i, rng.randint(0, 90), rng.randint(1, 40), rng.choice((0, 0, 7)))
            for i in range(rng.randint(1, 2))
        ]
        metadata = manager.reserve_request(name, rows)
        if metadata is None:
            continue
        metadata = pickle.loads(pickle.dumps(metadata))
        fault = rng.choice((None, None, "fewer", "outside", "stale", "conflict"))
        broken = None if fault is None else damage(metadata, fault)
        if fault in ("fewer", "outside"):
            for install in (worker.backend.install_diffusion_kv_metadata, table.install):
                with pytest.raises(REFUSALS):
                    install(broken)
            refused += 1
        assert worker.backend.install_diffusion_kv_metadata(metadata) is True
        assert table.install(metadata) is True
        assert worker.backend.install_diffusion_kv_metadata(metadata) is False
        assert table.install(metadata) is False
        if fault in ("stale", "conflict"):
            with pytest.raises(ValueError):
                worker.backend.install_diffusion_kv_metadata(broken)
            with pytest.raises(LayoutError):
                table.install(broken)
            refused += 1
        assert our_blocks(table, metadata) == blocks_of(worker, metadata)
        live[name] = metadata
    assert refused > 20
    assert table.num_rows == len(worker.backend._diffusion_kv_identity_to_row)


def damage(metadata: Any, fault: str) -> Any:
    broken = pickle.loads(pickle.dumps(metadata))
    first = broken.sequences[0]
    if fault == "fewer":
        first.block_ids[0].pop()
    elif fault == "outside":
        first.block_ids[0][0] = 40
    elif fault == "stale":
        broken.allocation_generation -= 1
    else:
        first.target_len -= 1
        first.prefix_len += 1
    return broken


def test_our_managers_payloads_install_in_its_worker() -> None:
    worker, manager, scheduler = new_worker()
    ours = OurManager(
        as_config(scheduler),
        max_model_len=SHAPE.max_model_len,
        scheduler_block_size=SHAPE.block_size,
        hash_block_size=SHAPE.block_size,
    )
    rng = random.Random(1)
    for number in range(12):
        name = f"r{number}"
        sizes = [(rng.randint(0, 60), rng.randint(1, 20)) for _ in range(rng.randint(1, 2))]
        mine = ours.reserve_request(
            name,
            [
                DiffusionKVRequest(
                    f"{name}-{i}", sequence_id=i, prefix_len=p, target_len=t, seq_len=p + t
                )
                for i, (p, t) in enumerate(sizes)
            ],
        )
        peer = manager.reserve_request(
            name, [peers.request(name, i, p, t) for i, (p, t) in enumerate(sizes)]
        )
        assert (mine is None) == (peer is None)
        if mine is None or peer is None:
            continue
        for s, t in zip(mine.sequences, peer.sequences, strict=True):
            assert (s.block_ids, s.seq_len, s.prefix_len) == (t.block_ids, t.seq_len, t.prefix_len)
        assert worker.backend.install_diffusion_kv_metadata(mine)
        assert blocks_of(worker, mine)
        if rng.random() < 0.5:
            worker.backend.remove_diffusion_kv_requests([name])
            ours.free_request(name)
            manager.free_request(name)
