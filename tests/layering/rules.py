"""Which package may import what, and a checker that reads source files.

Imports are found in the syntax tree, wherever they stand: at the top, in a function, under
``TYPE_CHECKING``, in ``try``; and ``importlib.import_module("name")`` or ``__import__("name")``
with a literal name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Rule:
    """What the Python files under ``path`` may import beside the standard library."""

    path: str  #: a package folder or a file, relative to the root; the longest match counts
    allowed: tuple[str, ...]  #: dotted prefixes
    nested_only: tuple[str, ...] = ()  #: allowed inside functions and for type checking alone
    exclusive: tuple[str, ...] = ()  #: at most one of these in one file
    everything: bool = False  #: any import but those of ``forbidden``
    forbidden: tuple[str, ...] = ()


FRAMEWORK_HOSTS = ("vllm", "vllm_omni", "diffusers")
"""Projects that only ``integrations/`` may import."""

RULES: tuple[Rule, ...] = (
    Rule("layout_core", ("layout_core",)),
    Rule("block_manager", ("block_manager", "layout_core")),
    # the registry: loads engines on demand, by name, and knows no framework
    Rule("backends", ("backends.registry", "layout_core")),
    Rule("backends/triton_kernels", ("backends.triton_kernels", "triton")),
    Rule(
        "backends/torch_cuda",
        ("backends.torch_cuda", "backends.triton_kernels", "layout_core", "torch"),
        nested_only=("ml_dtypes", "numpy"),  # interchange with NumPy, inside the calls that do it
    ),
    Rule(
        "backends/jax_gpu",
        (
            "backends.jax_gpu",
            "backends.triton_kernels",
            "layout_core",
            "jax",
            "jax_triton",
            "ml_dtypes",  # JAX's own element types
            "numpy",
        ),
    ),
    Rule(
        "diffusion_runner",
        (),
        everything=True,
        forbidden=FRAMEWORK_HOSTS,
        exclusive=("torch", "jax"),
    ),
    Rule("integrations", (), everything=True),
    Rule("examples", (), everything=True, forbidden=FRAMEWORK_HOSTS),
    # its control plane is vLLM-Omni's own
    Rule("examples/omni_split.py", (), everything=True, forbidden=("diffusers",)),
    # it shows two lines in a program of diffusers', so it is one
    Rule("examples/diffusers_runner.py", (), everything=True, forbidden=("vllm", "vllm_omni")),
)


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module, as found in a file."""

    module: str  #: dotted, absolute
    line: int
    nested: bool  #: inside a function, or for type checking alone


def _inside(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def _literal_import(node: ast.Call) -> str | None:
    """The name in ``importlib.import_module("x")``, ``import_module("x")``, ``__import__("x")``."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    if isinstance(node.func, ast.Name):
        name = node.func.id
    if name in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return None


def imports_of(source: str, package: str) -> Iterator[Import]:
    """All imports in ``source``, a module of the dotted ``package`` (for relative imports).

    ``from a import b`` counts as ``a.b``, since ``b`` may be a submodule.
    """

    def walk(node: ast.AST, nested: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = nested or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), True)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), nested)
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, nested)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")
                    parents = parents[: len(parents) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, nested)
            elif isinstance(child, ast.Call):
                literal = _literal_import(child)
                if literal is not None:
                    yield Import(literal, child.lineno, nested)
            yield from walk(child, inner)

    yield from walk(ast.parse(source), False)


def files_of(root: Path, rule: Rule, rules: tuple[Rule, ...] = RULES) -> list[Path]:
    """Python files that ``rule`` governs: under its path and under no longer path of another."""
    longer = [root / r.path for r in rules if r.path.startswith(rule.path + "/")]
    top = root / rule.path
    found = [top] if top.is_file() else sorted(top.rglob("*.py"))
    return [file for file in found if not any(file.is_relative_to(other) for other in longer)]


def violations(root: Path, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Every import that breaks a rule, as ``file:line: what and why``."""
    out: list[str] = []
    for rule in rules:
        for file in files_of(root, rule, rules):
            relative = file.relative_to(root)
            package = ".".join(relative.parent.parts)
            chosen: dict[str, int] = {}
            for found in imports_of(file.read_text(encoding="utf-8"), package):
                where = f"{relative.as_posix()}:{found.line}"
                top = found.module.split(".")[0]
                if _inside(found.module, rule.forbidden):
                    out.append(f"{where}: {rule.path} must not import {found.module}")
                if top in rule.exclusive:
                    chosen.setdefault(top, found.line)
                if rule.everything or top in sys.stdlib_module_names:
                    continue
                if _inside(found.module, rule.allowed):
                    continue
                if _inside(found.module, rule.nested_only):
                    if not found.nested:
                        out.append(f"{where}: {found.module} is allowed inside functions alone")
                    continue
                out.append(f"{where}: {rule.path} must not import {found.module}")
            if len(chosen) > 1:
                line = max(chosen.values())
                out.append(
                    f"{relative.as_posix()}:{line}: one framework at a time, got "
                    f"{' and '.join(sorted(chosen))}"
                )
    return out
