"""Ahead-of-time compilation of launches, with no GPU: what the compiler makes of a kernel.

Only what both engines always give is taken for granted: arrays start at multiples of 16 bytes.
Nothing is assumed of numbers, so what holds here holds for torch and for JAX.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.backends.nvidia.compiler import get_ptxas  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from backends.triton_kernels.launch import Buffer, Launch

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
"""The chips that kernels are compiled for: A100, H100 and H200, B200."""

_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
    "pool": "u8",
    "int": "i64",
    "int32": "i32",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came out of the compiler."""

    ptx: str
    ttir: str
    shared_bytes: int
    registers: int  #: of a thread
    spilled_bytes: int  #: stores and loads of registers that did not fit
    stack_bytes: int  #: local memory of a thread

    @property
    def matrix_instructions(self) -> int:
        """Tensor-core products: ``mma.sync``, ``wgmma``, ``tcgen05``."""
        return len(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", self.ptx))

    def async_copies(self, size: int) -> int:
        """Copies from global to shared memory of ``size`` bytes each."""
        return len(re.findall(rf"cp\.async\.c[ga]\.shared\.global[^;]*, {size:#x},", self.ptx))

    def loads(self, size: int) -> int:
        """Loads from global memory that take ``size`` bytes at once."""
        found = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bufs](\d+)\s", self.ptx)
        return sum(int(count or 1) * int(bits) // 8 == size for count, bits in found)

    def stores(self, size: int) -> int:
        """Stores to global memory of ``size`` bytes at once."""
        found = re.findall(r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.[bufs](\d+)\s", self.ptx)
        return sum(int(count or 1) * int(bits) // 8 == size for count, bits in found)


def compile_launch(launch: Launch, capability: tuple[int, int]) -> Compiled:
    """Compile a launch for a chip; no GPU is needed, and the interpreter must be off.

    Raises:
        RuntimeError: the interpreter is on, or the assembler refuses the code.
    """
    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError(
            "launch.kernel: expected a compiled function; TRITON_INTERPRET was set when the "
            "kernels were imported"
        )
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, p in enumerate(launch.parameters):
        if isinstance(p, Buffer):
            signature[p.name] = "*" + _TYPES[p.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = "i32" if p.kind == "int" else "fp32"
    signature.update(dict.fromkeys(launch.constexprs, "constexpr"))
    source = ASTSource(launch.kernel, signature, launch.constexprs, attributes)
    number = capability[0] * 10 + capability[1]
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", number, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    ptx = compiled.asm["ptx"]
    registers, stack, spilled = _assemble(ptx, number)
    return Compiled(ptx, compiled.asm["ttir"], compiled.metadata.shared, registers, spilled, stack)


def _assemble(ptx: str, number: int) -> tuple[int, int, int]:
    """Registers, bytes of stack and of spills, as the assembler reports them."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    if target is None:
        raise RuntimeError("ptx: no .target in it")
    tool = get_ptxas(number).path
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.ptx"
        code.write_text(ptx)
        command = [tool, "-v", f"-arch={target[1]}", str(code), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    log = done.stderr
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    if used is None or frame is None:
        raise RuntimeError(f"ptxas: no register report in {log!r}")
    return int(used[1]), int(frame[1]), int(frame[2]) + int(frame[3])
