"""These tests run the trainer of this source tree; SOTTO_LIBRARY names the library of the build."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PATHS = [
    str(HERE),
    str(HERE.parent),
    str(ROOT / "integration/netns"),
    str(ROOT / "bindings/python/src"),
    str(ROOT / "bindings/python/tests"),
]
sys.path[:0] = [path for path in PATHS if path not in sys.path]
os.environ.setdefault("SOTTO_LIBRARY", str(ROOT / "build/dev/lib/libsotto.so"))
# integration/torch is no package and must not be taken for PyTorch where that is missing: the
# report's folder, its parent, goes behind everything else, and into tests that need it alone.
