"""What is launched, in plain words: one description for torch, JAX, the interpreter and AOT.

A :class:`Launch` names the kernel, its grid and its parameters in the order of the kernel's
signature: inputs, then outputs, then constants. The outputs follow the last input directly,
as ``jax_triton`` wants them. A buffer that is changed in place is named twice, as an input
that the kernel does not touch and as an output: both are the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Constant = int | bool | str | float


@dataclass(frozen=True, slots=True)
class Buffer:
    """A parameter that is an array: its address is passed.

    Shapes are in elements. A ``shape`` of ``None`` is any: strides are parameters of their own.
    """

    name: str  #: the kernel's parameter
    buffer: str  #: what the engine binds; two parameters of one buffer share its memory
    dtype: str  #: element type, as ``float32``; ``pool`` for the pool's own words, of any type
    role: Literal["in", "out"]
    shape: tuple[int, ...] | None = None  #: of an output that the engine makes


@dataclass(frozen=True, slots=True)
class Scalar:
    """A parameter that is a number, passed by value."""

    name: str
    kind: Literal["int", "float"]
    value: int | float | None  #: ``None``: the engine gives it at each call, by its name


Parameter = Buffer | Scalar


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Everything in it is decided on the host; nothing reads the device."""

    kernel: Any  #: a ``triton.JITFunction``
    grid: tuple[int, int, int]
    parameters: tuple[Parameter, ...]  #: in the order of the kernel's signature
    constants: tuple[tuple[str, Constant], ...]  #: compile-time parameters, by name
    num_warps: int
    num_stages: int

    @property
    def constexprs(self) -> dict[str, Constant]:
        """The constants as keyword arguments."""
        return dict(self.constants)

    @property
    def inputs(self) -> tuple[Parameter, ...]:
        """Arrays and numbers that come before the outputs, in order."""
        return tuple(p for p in self.parameters if isinstance(p, Scalar) or p.role == "in")

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """Arrays that the kernel writes, in order."""
        return tuple(p for p in self.parameters if isinstance(p, Buffer) and p.role == "out")

    @property
    def aliases(self) -> dict[int, int]:
        """Input number to output number where both are one buffer, among :attr:`inputs`.

        Only arrays are counted on the input side, as ``jax_triton`` counts them.
        """
        arrays = [p for p in self.parameters if isinstance(p, Buffer) and p.role == "in"]
        places = {p.buffer: i for i, p in enumerate(arrays)}
        return {
            places[out.buffer]: index
            for index, out in enumerate(self.outputs)
            if out.buffer in places
        }

    def bind(self, buffers: Mapping[str, Any], scalars: Mapping[str, float] = {}) -> list[Any]:
        """The positional arguments, for a launcher that passes outputs like inputs.

        Args:
            buffers: an array for each buffer name.
            scalars: a number for each scalar whose value is ``None``.

        Raises:
            KeyError: a buffer or a scalar that is missing, by name.
        """
        out: list[Any] = []
        for p in self.parameters:
            if isinstance(p, Buffer):
                out.append(buffers[p.buffer])
            else:
                out.append(scalars[p.name] if p.value is None else p.value)
        return out

    @property
    def is_empty(self) -> bool:
        """Whether the grid holds no program: there is nothing to launch."""
        return 0 in self.grid
