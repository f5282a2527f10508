"""These tests use the Python package of the source tree and the helpers of its own tests."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PATHS = [
    str(HERE),
    str(ROOT / "bindings/python/src"),
    str(ROOT / "bindings/python/tests"),
    str(ROOT / "tests/model"),
]
sys.path[:0] = [path for path in PATHS if path not in sys.path]
os.environ.setdefault("SOTTO_LIBRARY", str(ROOT / "build/dev/lib/libsotto.so"))
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
