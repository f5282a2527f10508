#!/usr/bin/env python3
"""run_pytest.py FILE [PYTEST_OPTIONS...]: runs a test file, with an interpreter that has what it needs.

Debian's Python has no torch. For a file that is skipped without torch, .venv of this checkout is taken where it has torch and pytest
(integration/setup.sh bench installs both), unless this interpreter has them itself.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDS_TORCH = ('importorskip("torch"', 'find_spec("torch")')
NEEDED = ("numpy", "pytest", "torch")


def has_torch(python):
    probe = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {NEEDED})))"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def interpreter(file, venv=ROOT / ".venv/bin/python"):
    """The Python for a test file."""
    text = Path(file).read_text(encoding="utf-8")
    if not any(need in text for need in NEEDS_TORCH) or all(map(importlib.util.find_spec, NEEDED)):
        return sys.executable
    return str(venv) if has_torch(str(venv)) else sys.executable


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    python = interpreter(sys.argv[1])
    os.execv(python, [python, "-B", "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]])


if __name__ == "__main__":
    main()
