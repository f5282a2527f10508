#!/usr/bin/env python3
"""run_pytest.py FILE [PYTEST_OPTIONS...]: runs a test file, with an interpreter that has what it needs.

Debian's Python has no torch, DeepSpeed, mypy, ... For a file that is skipped without a module that this interpreter lacks, .venv of this
checkout is taken where it has the module and pytest (integration/setup.sh test installs them).

For a file that needs torch, pytest and the programs that its tests start are forks of one process that has imported it (python/tests/warm.py).
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED_WITHOUT = re.compile(r"""(?:importorskip|find_spec)\(\s*["'](\w+)["']""")


def needs(file):
    """Modules without which tests of a file are skipped."""
    return set(SKIPPED_WITHOUT.findall(Path(file).read_text(encoding="utf-8")))


def has(python, modules):
    probe = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {sorted(modules)})))"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def interpreter(file, venv=ROOT / ".venv/bin/python"):
    """The Python for a test file: the one that has most of what it needs."""
    missing = [name for name in needs(file) if importlib.util.find_spec(name) is None]
    for wanted in (missing, ["torch"] if "torch" in missing else []):
        if wanted and has(str(venv), [*wanted, "pytest"]):
            return str(venv)
    return sys.executable


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    python = interpreter(sys.argv[1])
    words = ["-B", "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]]
    if "torch" not in needs(sys.argv[1]) or not has(python, ["torch"]):
        os.execv(python, [python, *words])
    sys.path.insert(0, str(ROOT / "bindings/python/tests"))
    import warm

    warmed = warm.python("torch", interpreter=python)
    sys.exit(subprocess.run([warmed, *words], env={**os.environ, "WARM_PYTHON": warmed}, check=False).returncode)


if __name__ == "__main__":
    main()
