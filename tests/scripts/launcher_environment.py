"""The environment in which tests start the examples of integration/launchers."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(library, **more):
    """Without what other launchers have set, with the Python package of the checkout. library: path of libsotto.so."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SOTTO_", "SLURM_", "OMPI_", "PMI_", "RAY_", "PYTHON"))
            and k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "SOTTO_LIBRARY": library, "PYTHONPATH": str(ROOT / "bindings/python/src"), "PYTHONDONTWRITEBYTECODE": "1",
            "SOTTO_CPU_THREADS": "1", "SOTTO_TIMEOUT_US": "60000000", **more}
