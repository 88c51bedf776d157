"""Programs over a pool as bytes: traced and lowered once, loaded where nothing is traced again.

    data = export_program("denoise", denoise, pool, batch, query)   # at build time
    program = load_program(data)                                    # in a worker
    output, pool = program(pool, batch, query)

The bytes hold StableHLO, so a worker still compiles them for its device; with
:func:`backends.jax_gpu.caching.use_compilation_cache` only the first worker does.

What a program was traced for is not in StableHLO: a layer's offset, a KV head count and a kernel
are constants there. So the bytes carry a description of it, and a program refuses a pool or a
batch of another plan, which it would read at the wrong offsets. Export with a portable pool
(:meth:`JaxPool.portable`) to have one program for all layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export as jax_export

from backends.jax_gpu.allocator import JaxPool
from backends.jax_gpu.batch import JaxBatch
from backends.jax_gpu.donation import run_donated
from backends.jax_gpu.paging import PoolPlan
from layout_core.errors import PoolError
from layout_core.packages import check_installed

FORMAT = 1
"""Of the header and of the lines in it; a reader refuses another."""

TRITON_CALL = "triton_kernel_call"
"""What ``jax_triton`` calls its launches; JAX promises nothing about them to later versions."""

_MAGIC = b"pagestride program\n"


def export_program(
    name: str,
    function: Callable[..., tuple[Any, JaxPool]],
    pool: JaxPool,
    *arguments: Any,
    platforms: Sequence[str] | None = None,
) -> bytes:
    """``function(pool, *arguments) -> (output, pool)`` as bytes.

    Args:
        name: what the program is called; it names what ``function`` itself fixes, say a number
            of rows, because only arguments are described.
        pool, arguments: examples; only their shapes, dtypes and plans count. Batches may lie
            anywhere in the arguments. The pool is not consumed.
        platforms: ``"cpu"``, ``"cuda"``; the default device's without it. No such device need
            be there.

    Returns:
        Bytes for :func:`load_program`. The output must be made of tuples, lists, dicts and
        arrays.

    Raises:
        MissingPackageError: flatbuffers, which JAX writes with, is not installed.
    """
    _check_packages()

    def flat(words: Any, leaves: list[Any]) -> tuple[Any, Any]:
        own = jax.tree.unflatten(structure, [words, *leaves])
        output, new = function(*own)
        return output, new.words

    (words, *leaves), structure = jax.tree.flatten((pool, *arguments))
    # the words come first, and a donated argument keeps its place
    exported = jax_export.export(
        jax.jit(flat, donate_argnums=0),
        platforms=platforms,
        # a launch's code is in the bytes, for the chip that the batch was prepared for
        disabled_checks=[jax_export.DisabledSafetyCheck.custom_call(TRITON_CALL)],
    )(words, leaves)
    header = {"format": FORMAT, "name": name, "takes": _describe((pool, *arguments))}
    return b"".join(
        (_MAGIC, json.dumps(header, ensure_ascii=True).encode(), b"\n", exported.serialize())
    )


def load_program(data: bytes) -> ExportedProgram:
    """The program in the bytes of :func:`export_program`; nothing is compiled yet.

    Raises:
        PoolError: the bytes are something else, or of another format.
        MissingPackageError: as :func:`export_program`.
    """
    _check_packages()
    if not data.startswith(_MAGIC):
        raise PoolError("data: expected the bytes of export_program, got something else")
    end = data.index(b"\n", len(_MAGIC))
    header = json.loads(data[len(_MAGIC) : end])
    if header["format"] != FORMAT:
        raise PoolError(f"data: expected format {FORMAT}, got {header['format']}")
    exported = jax_export.deserialize(bytearray(data[end + 1 :]))
    return ExportedProgram(header["name"], header["takes"], exported)


def _check_packages() -> None:
    check_installed("jax_gpu: an exported program", ["flatbuffers"], "jax")


class ExportedProgram:
    """A loaded program. Calling it donates the pool; see :func:`export_program`."""

    def __init__(self, name: str, takes: list[str], exported: Any) -> None:
        self._name = name
        self._takes = takes
        self._exported = exported
        self._program = jax.jit(exported.call, donate_argnums=0)
        self._compiled: Any = None

    @property
    def name(self) -> str:
        """What it was called at export."""
        return self._name

    @property
    def platforms(self) -> tuple[str, ...]:
        """Where it runs."""
        return tuple(self._exported.platforms)

    def serves(self, pool: JaxPool, *arguments: Any) -> bool:
        """Whether a call with these would be accepted."""
        return _describe((pool, *arguments)) == self._takes

    def compile(self, pool: JaxPool, *arguments: Any) -> Any:
        """The compiled program, made at the first call; see :mod:`backends.jax_gpu.compiled`.

        Raises:
            PoolError: a pool, a batch or an array that it was not exported for.
        """
        takes = _describe((pool, *arguments))
        if takes != self._takes:
            raise PoolError(f"program {self._name!r}: {_first_difference(self._takes, takes)}")
        if self._compiled is None:
            words, *leaves = jax.tree.leaves((pool, *arguments))
            self._compiled = self._program.lower(words, leaves).compile()
        return self._compiled

    def __call__(self, pool: JaxPool, *arguments: Any) -> tuple[Any, JaxPool]:
        """``(output, pool)``; the pool given is consumed.

        Raises:
            PoolError: as :meth:`compile`; or the pool was copied, see :func:`run_donated`.
        """
        compiled = self.compile(pool, *arguments)

        def run(pool: JaxPool) -> tuple[Any, JaxPool]:
            words, *leaves = jax.tree.leaves((pool, *arguments))
            output, new = compiled(words, leaves)
            return output, pool.with_words(new)

        result: tuple[Any, JaxPool] = run_donated(self._name, run, pool)
        return result


def _describe(arguments: tuple[Any, ...]) -> list[str]:
    """Lines with all that a traced program took from its arguments, one for each thing."""
    lines: list[str] = []

    def is_ours(node: Any) -> bool:
        return isinstance(node, (JaxPool, JaxBatch))

    for path, node in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=is_ours):
        where = f"arguments{jax.tree_util.keystr(path)}"
        if isinstance(node, JaxPool):
            lines.extend(f"{where}: {line}" for line in _plan(node.plan, node.is_portable))
        elif isinstance(node, JaxBatch):
            shape = node.shape
            lines.append(
                f"{where}: group {shape.group}, {shape.num_heads} query heads, kernel "
                f"{node.kernel}, {shape.bound.work!r}"
            )
            lines.extend(f"{where}: {line}" for line in _plan(shape.plan, node.is_portable))
        leaves = jax.tree.leaves(node)
        lines.extend(f"{where}: array {_array(leaf)}" for leaf in leaves)
    return lines


def _array(leaf: Any) -> str:
    kind: Any = jax.typeof(leaf)
    return f"{kind.dtype.name}{list(kind.shape)}"


def _plan(plan: PoolPlan, portable: bool) -> list[str]:
    rows, width = plan.shape
    lines = [f"a pool of {rows} rows of {width} words of {plan.geometry.word_bits} bits"]
    for view, cell, at in zip(plan.resolved.layers, plan.cells, plan.addresses, strict=True):
        place = "anywhere" if portable else f"at row {at[0]}, strides {at[1:4].tolist()}"
        lines.append(
            f"layer {view.name!r} of group {view.group}, {cell.num_kv_heads} KV heads, blocks of "
            f"{cell.block_size}, {cell.head_size} + {cell.head_size_v} {cell.dtype} in "
            f"{cell.rows_per_cell} rows, {at[4]} slots, {place}"
        )
    return lines


def _first_difference(expected: list[str], got: list[str]) -> str:
    for want, have in zip(expected, got, strict=False):
        if want != have:
            return f"it was exported for ({want}), got ({have})"
    return f"it was exported for {len(expected)} arrays and layers, got {len(got)}"
