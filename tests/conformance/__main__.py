"""``python -m tests.conformance``: compare with the vLLM of this environment."""

from __future__ import annotations

import sys

from tests.conformance.runner import main

if __name__ == "__main__":
    sys.exit(main())
