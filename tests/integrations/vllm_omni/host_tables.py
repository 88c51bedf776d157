"""vLLM's ``BlockTables`` on the host: its own pins memory and launches Triton kernels.

The constructor and the methods that vLLM-Omni calls; slots as vLLM's kernel computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class _Counts:
    """``num_blocks`` of vLLM's class: ``[groups, rows]`` kernel blocks."""

    def __init__(self, groups: int, rows: int) -> None:
        self.np = np.zeros((groups, rows), dtype=np.int32)

    def copy_to_uva(self) -> None:
        pass


class HostBlockTables:
    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        kernel_block_sizes: list[int],
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: list[bool] | None = None,
    ) -> None:
        self.block_sizes = block_sizes
        self.kernel_block_sizes = kernel_block_sizes
        self.max_num_reqs = max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = device
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave
        self.blocks_per_kv_block = [a // b for a, b in zip(block_sizes, kernel_block_sizes)]
        self.num_blocks = _Counts(len(block_sizes), max_num_reqs)
        widths = [n * k for n, k in zip(max_num_blocks_per_group, self.blocks_per_kv_block)]
        self._tables = [torch.zeros(max_num_reqs, n, dtype=torch.int32) for n in widths]

    def init_block_table_layout_tensors(self) -> None:
        pass

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        assert overwrite, "vLLM-Omni always overwrites"
        for group, ids in enumerate(new_block_ids):
            ratio = self.blocks_per_kv_block[group]
            kernel = [block * ratio + part for block in ids for part in range(ratio)]
            self._tables[group][req_index, : len(kernel)] = torch.tensor(kernel, dtype=torch.int32)
            self.num_blocks.np[group, req_index] = len(kernel)

    def apply_staged_writes(self) -> None:
        pass

    def gather_block_tables(
        self, idx_mapping: torch.Tensor, num_reqs_padded: int
    ) -> tuple[torch.Tensor, ...]:
        return tuple(table[idx_mapping.long()][:num_reqs_padded] for table in self._tables)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
    ) -> torch.Tensor:
        counts = (query_start_loc[1:] - query_start_loc[:-1]).long()
        rows = torch.repeat_interleave(idx_mapping.long(), counts)
        out: list[Any] = []
        for table, size in zip(self._tables, self.kernel_block_sizes):
            blocks = table[rows, positions // size].long()
            out.append((blocks * size + positions % size)[:num_tokens_padded])
        return torch.stack(out)
