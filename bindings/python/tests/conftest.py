"""Tests run on the source tree; SOTTO_LIBRARY names the library of the build."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
os.environ.setdefault("SOTTO_LIBRARY", str(HERE.parents[2] / "build/dev/lib/libsotto.so"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
