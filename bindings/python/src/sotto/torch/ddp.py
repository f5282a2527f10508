"""A communication hook for DistributedDataParallel: gradients averaged by sotto, with any codec."""

# Annotations are evaluated here: DDP compares those of a hook with its own classes.
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Optional

import torch
import torch.distributed as dist

from .._text import counted
from ..codec import Codec
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError
from ..group import meet
from ..work import Work
from .averagers import check_same_ranks, ddp_modules

FORMAT = 1


class DDPState:
    """What :func:`ddp_hook` keeps: a codec with its residuals for every bucket of gradients.

    codec:   "int8", "onebit" or another kind of sotto.Codec, or None: the plain mean
    comm:    of the same ranks as DDP's process group, which the first backward() checks; None: as
             for the optimizers
    options: the codec's own, as for sotto.Codec

    "onebit" is for optimizers that add gradients up, as SGD with momentum does. Adam and LAMB
    divide by the squares of gradients, which one bit does not carry, and learn little with it: take
    "int8", or sotto.torch.OnebitAdam, OnebitLamb or ZeroOneAdam without a hook.

    The first step of every process is sent in full precision: DDP arranges its buckets anew after
    it. Use it with one model, and close() it before the comm.
    """

    def __init__(
        self, codec: Optional[str] = "onebit", *, comm: Optional[Comm] = None, **options: Any
    ) -> None:
        if codec is None and options:
            raise InvalidArgumentError(f"options {', '.join(options)} are given without a codec")
        self.comm = meet(comm)
        self.codec = codec
        self.options = options
        self.steps = 0  # of this process
        self._checked = False
        self._closed = False
        self._codecs: dict[int, tuple[int, Codec]] = {}
        self._loaded: dict[int, tuple[int, Any]] = {}
        self._mode = "exact"
        self._stream: Any = None  # on which buckets without a codec wait on a CUDA device
        self._flying: dict[int, Work] = {}  # their last operations
        self._error: Optional[Exception] = None  # of a bucket, to be raised by this backward()
        # One thread waits, in the order of submission, so that backward goes on meanwhile.
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sotto-ddp")
        if codec is not None:  # a wrong name or option is told here, not in the first backward
            self.comm.codec(codec, torch.empty(1), **options).close()

    def close(self) -> None:
        """Gives the codecs back. A second call does nothing."""
        self._closed = True
        self._waiter.shutdown()
        for _, codec in self._codecs.values():
            codec.close()
        self._codecs.clear()
        flying, self._flying = self._flying, {}
        for work in flying.values():
            work.wait()

    def state_dict(self, mode: str = "exact") -> dict[str, Any]:
        """The residuals of all buckets.

        mode: "exact": this rank's, to be saved by every rank and loaded by the same; "mean":
        averaged over ranks, the same on all of them: collective, for any number of ranks.
        """
        buckets = {}
        for index, (count, codec) in sorted(self._codecs.items()):
            blob = codec.export_state(mode)
            buckets[index] = {"count": count, "state": torch.frombuffer(blob, dtype=torch.uint8)}
        for index, (count, state) in self._loaded.items():  # loaded, but not used yet
            buckets.setdefault(index, {"count": count, "state": state})
        return {
            "format": FORMAT,
            "codec": self.codec,
            "options": dict(self.options),
            "mode": self._mode if self._loaded else mode,
            "buckets": buckets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the residuals of a state_dict; they act from the second step of this process on.

        Errors: InvalidArgumentError (other format, codec or options); a bucket with another number
        of elements, or damaged residuals, are told when the bucket is first used.
        """
        if state.get("format") != FORMAT:
            raise InvalidArgumentError(
                f"the state has format {state.get('format')}, this version knows {FORMAT}"
            )
        found = (state["codec"], dict(state["options"]))
        if found != (self.codec, self.options):
            raise InvalidArgumentError(
                f"the state is of codec {found[0]} {found[1]}, this hook has {self.codec} "
                f"{self.options}"
            )
        self._mode = state["mode"]
        self._loaded = {int(i): (int(b["count"]), b["state"]) for i, b in state["buckets"].items()}
        for _, codec in self._codecs.values():
            codec.close()
        self._codecs.clear()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DDPState cannot be pickled or copied: save its state_dict(), load it into a new one"
        )

    def _codec_for(self, index: int, values: torch.Tensor) -> Codec:
        count, codec = self._codecs.get(index, (0, None))
        if codec is not None and count == values.numel():
            return codec
        if codec is not None:
            warnings.warn(
                f"bucket {index} has {counted(values.numel(), 'element')} now and had {count}: "
                "its residual starts anew",
                stacklevel=2,
            )
            codec.close()
        codec = self.comm.codec(str(self.codec), values, **self.options)
        self._codecs[index] = (values.numel(), codec)
        loaded = self._loaded.pop(index, None)
        if loaded is not None:
            if loaded[0] != values.numel():
                raise InvalidArgumentError(
                    f"the loaded residual of bucket {index} has "
                    f"{counted(loaded[0], 'element')}, the bucket "
                    f"{values.numel()}: the model or DDP's bucket_cap_mb differs"
                )
            codec.import_state(loaded[1].numpy(), self._mode)
        return codec

    def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket; the future has its buffer."""
        if self._closed:
            raise InvalidStateError(
                "the DDPState of ddp_hook is closed, and the model still has the hook: close() it "
                "behind the last backward()"
            )
        values = sent = bucket.buffer()
        codec = None
        if not self._checked:
            for module in ddp_modules(bucket.parameters()):
                check_same_ranks(module, self.comm)
            self._checked = True
        if self.codec is not None and self.steps > 0:
            sent = values.float()  # what codecs take; float32 is itself
            codec = self._codec_for(bucket.index(), sent)
        work = self.comm.all_reduce(sent, op="mean", codec=codec)
        if bucket.is_last():
            self.steps += 1
            # Behind DDP's own callback, which would turn an error into one of its own.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._raise_error))
        devices = [values.device] if work.on_cuda else None  # whose streams wait for the future
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if work.on_cuda and codec is None:  # NaN goes to all ranks alike: the host need not know
            self._waiter.submit(self._finish_on_stream, work, bucket.index(), values, future)
        else:
            self._waiter.submit(self._finish, work, sent, values, future)
        return future

    def _finish_on_stream(self, work: Work, index: int, values: torch.Tensor, future: Any) -> None:
        """DDP's stream waits for the device; backward's own goes on. Errors come a step later.

        On the waiting thread, since wait_stream() waits until the operation is queued.
        """
        try:
            before, self._flying[index] = self._flying.get(index), work
            if before is not None:
                before.wait()
            if self._stream is None:
                self._stream = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):  # where the future records its event
                work.wait_stream()
                future.set_result(values)
        except Exception as error:
            self._fail(error, values, future)

    def _finish(self, work: Work, sent: torch.Tensor, values: torch.Tensor, future: Any) -> None:
        try:
            work.wait()
            if sent is not values:
                if sent.is_cuda:  # made on backward's stream, read on this thread's
                    sent.record_stream(torch.cuda.current_stream(sent.device))
                values.copy_(sent)
        except Exception as error:
            self._fail(error, values, future)
        else:
            future.set_result(values)

    def _fail(self, error: Exception, values: torch.Tensor, future: Any) -> None:
        self._error = self._error or error
        future.set_result(values)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def ddp_hook(
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # not in torch's own types
) -> torch.futures.Future[torch.Tensor]:
    """``ddp_model.register_comm_hook(DDPState("onebit"), ddp_hook)``

    Every bucket of gradients is averaged over the ranks of the state's comm while backward goes on.
    Errors, the operation's own, come out of backward(), whose gradients are not averaged then; on a
    CUDA device without a codec out of the next backward(), since the host does not wait there.
    """
    return state.start(bucket)
