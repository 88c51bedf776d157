"""The stateful machine can fail: each planted fault must turn it red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import block_manager.requests as requests_module
from block_manager import BlockPool, BlockPoolError
from block_manager.cache_manager import DiffusionKVCacheManager
from tests.manager.test_machine import ManagerMachine

Plant = Callable[[pytest.MonkeyPatch], None]


def _keys_forget_the_branch(patch: pytest.MonkeyPatch) -> None:
    real = requests_module.PrefixDomain
    patch.setattr(
        requests_module, "PrefixDomain", lambda ns, lora, scale, salt, branch: real(ns, lora, scale)
    )


def _keys_are_not_chained(patch: pytest.MonkeyPatch) -> None:
    real = requests_module.prefix_keys

    def unchained(words: bytes, size: int, domain: Any, *, num_tokens: int, **kwargs: Any) -> Any:
        return [
            real(words[8 * start : 8 * (start + size)], size, domain, num_tokens=size)[0]
            for start in range(0, num_tokens // size * size, size)
        ]

    patch.setattr(requests_module, "prefix_keys", unchained)


def _no_block_is_shared(patch: pytest.MonkeyPatch) -> None:
    """Copy-on-write never happens."""
    real = DiffusionKVCacheManager._rewrite

    def blind(self: Any, *args: Any) -> Any:
        count = BlockPool.ref_count
        BlockPool.ref_count = lambda pool, block: min(count(pool, block), 1)  # type: ignore[method-assign]
        try:
            return real(self, *args)
        finally:
            BlockPool.ref_count = count  # type: ignore[method-assign]

    patch.setattr(DiffusionKVCacheManager, "_rewrite", blind)


def _copies_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = DiffusionKVCacheManager._rewrite

    def forgetful(self: Any, *args: Any) -> Any:
        update = real(self, *args)
        for pairs in update.copies if update is not None else ():
            pairs.clear()
        return update

    patch.setattr(DiffusionKVCacheManager, "_rewrite", forgetful)


def _hits_are_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "touch", lambda pool, block_ids: None)


def _freed_blocks_keep_their_keys(patch: pytest.MonkeyPatch) -> None:
    """A block taken from the cache can still be found."""
    real = BlockPool._index_remove

    def keep(pool: Any, key: bytes, block: int) -> int:
        place = real(pool, key, block)
        pool._index.setdefault(key, block)
        return place

    patch.setattr(BlockPool, "_index_remove", keep)


def _evicts_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    real = DiffusionKVCacheManager.evict_before

    def greedy(self: Any, request_id: str, first_keys: dict[int, int]) -> Any:
        sizes = self.geometry.block_sizes
        object.__setattr__(self.geometry, "block_sizes", tuple(max(1, s // 2) for s in sizes))
        try:
            return real(self, request_id, first_keys)
        finally:
            object.__setattr__(self.geometry, "block_sizes", sizes)

    patch.setattr(DiffusionKVCacheManager, "evict_before", greedy)


def _a_failed_change_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_undo_touch", lambda pool, block_ids, woken: None)


FAULTS: list[Plant] = [
    _keys_forget_the_branch,
    _keys_are_not_chained,
    _no_block_is_shared,
    _copies_are_forgotten,
    _hits_are_not_held,
    _freed_blocks_keep_their_keys,
    _evicts_one_block_too_many,
    _a_failed_change_is_not_undone,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_turns_the_machine_red(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, BlockPoolError)):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            ManagerMachine,
            settings=settings(
                max_examples=500,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
