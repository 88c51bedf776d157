"""Say in one line what is wrong with this Python, before pip says it in a hundred."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        f"pagestride: expected Python 3.11 to 3.13, got {sys.version.split()[0]} "
        f"({sys.executable}); choose another with: make PYTHON=python3.11 ..."
    )
