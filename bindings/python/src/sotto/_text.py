"""Words in messages."""

from __future__ import annotations


def counted(n: int, unit: str) -> str:
    """A count with its unit: "1 rank", "3 ranks"."""
    return f"{n} {unit}{'' if n == 1 else 's'}"
