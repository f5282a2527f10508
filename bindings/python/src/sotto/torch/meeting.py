"""How ranks find each other over a store of torch: a process group's, or torchrun's own."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import _abi as abi
from ..errors import (
    OperationTimeoutError,
    SottoError,
    TransportError,
    UnsupportedError,
    error_of,
)
from ..launch import default_timeout, detect

PAUSE_S = (0.001, 0.05)  # between two looks at the store: the first, and the longest

# How many meetings this process has begun, by the name of the group or of torchrun's attempt. A
# group that is destroyed and made again has the same name and may have the same store.
_begun: dict[str, int] = {}


def store_of(group: Any) -> Any:
    """The store that a process group was made with. Errors: UnsupportedError (it has none)."""
    store = distributed_c10d._world.pg_map[group][1]
    if store is None:
        raise UnsupportedError(
            "this process group has no store, as those of torch's MPI backend; call "
            "sotto.init_process_group(all_gather=...) before torch's own"
        )
    return store


def timeout_of(group: Any) -> float:
    """Seconds that the group's own operations may take."""
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            seconds = group._get_backend(torch.device(kind)).options._timeout.total_seconds()
            return float(seconds)
    return float(distributed_c10d.default_pg_timeout.total_seconds())


def _machine() -> str:
    """Equal for processes that can reach each other on loopback."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + os.readlink("/proc/self/ns/net")
    return socket.gethostname()


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that leads to a host; empty if none does."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _address(store: Any) -> str:
    """Where others reach this machine, as far as the way to the store shows."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return _address_towards(host, store.port) if isinstance(host, str) and host else ""


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.") or address == "::1"


class Meeting:
    """One meeting of ranks over a store of torch, each in its own process.

    Keys of the store begin with the name and the number of the meeting, so that what one has left
    behind that failed is not taken for a part of the next.

    store: on which ranks set and check keys. name: of the ranks, equal on all. what: the same for
    error texts. ranks: of the members in torch's world. timeout: seconds.
    """

    def __init__(
        self, store: Any, name: str, what: str, rank: int, ranks: Sequence[int], timeout: float
    ) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)
        self.timeout = timeout
        self._store, self._what = store, what
        self._deadline = time.monotonic() + timeout
        number = _begun.get(name, 0)
        _begun[name] = number + 1
        self._prefix = f"sotto/{name}/{number}/"
        self._written: list[str] = []
        self._gathered = 0

    @classmethod
    def of_group(cls, group: Any, timeout: float | None) -> Meeting:
        """All members of a process group. timeout: None: the group's own."""
        return cls(
            store_of(group),
            group.group_name,
            "torch's process group",
            dist.get_rank(group),
            dist.get_process_group_ranks(group),
            timeout_of(group) if timeout is None else timeout,
        )

    @classmethod
    def of_torchrun(cls, timeout: float | None) -> Meeting:
        """All ranks that torchrun has started, over the store that its agent serves.

        timeout: None: SOTTO_TIMEOUT_US. Errors: TransportError (the store cannot be reached).
        """
        found = detect(os.environ)
        assert found is not None
        seconds = default_timeout(os.environ) if timeout is None else timeout
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=datetime.timedelta(seconds=seconds),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise TransportError(
                f"torchrun's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, "
                f"over which the ranks meet: {error}"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"torchrun attempt {attempt}"
        return cls(store, name, "torchrun's job", found.rank, range(found.world_size), seconds)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """What goes wrong in the block on this rank is told to those that still wait for it."""
        try:
            yield
        except BaseException as error:
            # Keys of this rank stay: it came.
            status = getattr(error, "status", None) or abi.SOTTO_E_ABORTED
            text = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                self._store.set(
                    self._prefix + "failed", f"{status} {self._name(self.rank)} gave up: {text}"
                )
            raise
        # No rank reads them any more: the comm is there only when all have what they need.
        for key in self._written:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)

    def _name(self, rank: int) -> str:
        world = self.ranks[rank]
        return f"rank {rank}" if world == rank else f"rank {rank} (rank {world} of the world)"

    def all_gather(self, mine: bytes) -> list[bytes]:
        """What every member gives, in rank order.

        Errors: OperationTimeoutError (names the ranks that did not come), that of another rank,
        which gave up before, TransportError (the store is gone).
        """
        keys = [f"{self._prefix}{self._gathered}/{rank}" for rank in range(self.size)]
        self._gathered += 1
        try:
            self._store.set(keys[self.rank], mine.hex())
            self._written.append(keys[self.rank])
            self._wait(keys)
            return [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        except SottoError:
            raise
        except RuntimeError as error:
            raise TransportError(
                f"the store of {self._what}, over which the ranks meet: {error}"
            ) from error

    def _wait(self, keys: Sequence[str]) -> None:
        pause, longest = PAUSE_S
        failed = self._prefix + "failed"
        while not self._store.check(list(keys)):
            if self._store.check([failed]):
                status, text = self._store.get(failed).decode().split(" ", 1)
                raise error_of(int(status), text)
            if time.monotonic() >= self._deadline:
                self._give_up(keys)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _give_up(self, keys: Sequence[str]) -> None:
        absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if not absent:
            return
        names = ", ".join(self._name(rank) for rank in absent[:8])
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        raise OperationTimeoutError(
            f"waited {self.timeout:g} s to make a comm of {self._what} of {self.size} ranks; "
            f"not there: {names}{more}. Every rank of it has to make the comm, in the same order "
            "as other comms of these ranks"
        )

    def listen_at(self) -> str | None:
        """The address at which rank 0 accepts the others; None: loopback, or SOTTO_LISTEN decides.

        Collective. Where ranks are on several machines it is the one that leads to the store's
        host, or, on that host itself, to another member.
        """
        mine = {"machine": _machine(), "address": _address(self._store)}
        cards = [json.loads(card) for card in self.all_gather(json.dumps(mine).encode())]
        if self.rank != 0 or os.environ.get("SOTTO_LISTEN"):
            return None
        elsewhere = [card for card in cards if card["machine"] != mine["machine"]]
        if not elsewhere:
            return None
        if not _is_loopback(mine["address"]):
            return mine["address"]
        for card in elsewhere:
            towards = "" if _is_loopback(card["address"]) else _address_towards(card["address"], 9)
            if not _is_loopback(towards):
                return towards
        raise TransportError(
            "the ranks are on several machines, but torch's store does not tell by which addresses "
            "they reach each other; set SOTTO_LISTEN on rank 0 to its address or interface"
        )
