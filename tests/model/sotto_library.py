"""Ranks as threads on libsotto, through ctypes: just what the tests of this folder need."""
import ctypes as c
import os
import threading

import numpy as np

CPU = 1
DTYPES = {"float32": 0x00012002, "float64": 0x00014002, "float16": 0x00011002, "int64": 0x00014000, "int32": 0x00012000,
          "bool": 0x00010801}


class Buffer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("count", c.c_uint64), ("dtype", c.c_uint32), ("device_type", c.c_int32),
                ("device_id", c.c_int32), ("flags", c.c_uint32)]


class CommConfig(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("rank", c.c_int32), ("size", c.c_int32), ("reserved", c.c_uint32),
                ("id", c.c_void_p), ("transport", c.c_char_p), ("timeout_us", c.c_int64), ("all_gather", c.c_void_p),
                ("user", c.c_void_p)]


class ContextConfig(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("no_progress_thread", c.c_uint32), ("cpu_threads", c.c_uint32),
                ("max_ops", c.c_uint32)]


class Param(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("group", c.c_uint32), ("name", c.c_char_p), ("param", Buffer),
                ("grad", Buffer), ("model_copy", Buffer), ("mask", Buffer), ("models", c.c_uint64)]


class Call(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("flags", c.c_uint32), ("tag", c.c_uint64), ("stream", c.c_void_p),
                ("timeout_us", c.c_int64), ("priority", c.c_int32), ("reduce", c.c_int32), ("codec", c.c_void_p),
                ("on_done", c.c_void_p), ("user", c.c_void_p)]


class NamedArray(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("reserved", c.c_uint32), ("name", c.c_char_p), ("values", Buffer)]


def buffer(array):
    return Buffer(array.ctypes.data, array.size, DTYPES[array.dtype.name], CPU, 0, 0)


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.sotto_last_error.restype = c.c_char_p
        self.abi = self.lib.sotto_abi_version()
        self.environment = threading.Lock()

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {status}: {self.lib.sotto_last_error().decode()}")

    def context(self):
        handle = c.c_void_p()
        config = ContextConfig(c.sizeof(ContextConfig), 0, 1, 0)
        self.call("sotto_context_create_v", self.abi, c.byref(config), c.byref(handle))
        return handle

    def context_on(self, host):
        """A context of a rank on this host; contexts read the variables of their process when they are made."""
        with self.environment:
            if host is not None:
                os.environ["SOTTO_HOST_ID"] = f"host{host}"
            try:
                return self.context()
            finally:
                os.environ.pop("SOTTO_HOST_ID", None)

    def run(self, world, body, hosts=None):
        """body(comm, rank) on every rank; raises what the first rank raised. hosts: by rank, a number; None: this one."""
        hosts = hosts or [None] * world
        first = self.context_on(hosts[0])
        unique_id = (c.c_uint8 * 128)()
        self.call("sotto_unique_id_create", first, unique_id)
        errors = []

        def rank_main(rank):
            try:
                context = first if rank == 0 else self.context_on(hosts[rank])
                comm = c.c_void_p()
                config = CommConfig(c.sizeof(CommConfig), rank, world, 0, c.addressof(unique_id), None, 60_000_000, None,
                                    None)
                self.call("sotto_comm_create", context, c.byref(config), c.byref(comm))
                body(comm, rank)
                self.call("sotto_comm_destroy", comm)
                self.call("sotto_context_destroy", context)
            except Exception as error:  # pylint: disable=broad-except
                errors.append(f"rank {rank}: {error}")

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError("; ".join(errors))

    def optimizer(self, comm, json, tensors):
        """tensors: (name, group, parameters, gradients, mask), float32 that outlives the optimizer; mask: bool or None."""
        params = (Param * len(tensors))()
        for param, (name, group, p, g, mask) in zip(params, tensors):
            param.struct_size = c.sizeof(Param)
            param.name, param.group = name.encode(), group
            param.param, param.grad = buffer(p), buffer(g)
            if mask is not None:
                param.mask = buffer(mask)
        handle = c.c_void_p()
        self.call("sotto_optim_create", comm, json.encode(), params, c.c_uint64(len(tensors)), c.byref(handle))
        return handle

    def import_arrays(self, optimizer, values):
        """values: numpy arrays by name."""
        arrays = (NamedArray * len(values))()
        for array, (name, value) in zip(arrays, values.items()):
            array.struct_size = c.sizeof(NamedArray)
            array.name = name.encode()
            array.values = buffer(value)
        self.call("sotto_optim_state_import_arrays", optimizer, arrays, c.c_uint64(len(values)))

    def codec(self, comm, json, counts):
        handle = c.c_void_p()
        like = (Buffer * len(counts))(*[Buffer(None, n, DTYPES["float32"], CPU, 0, 0) for n in counts])
        self.call("sotto_codec_create", comm, json.encode(), like, c.c_uint64(len(counts)), c.byref(handle))
        return handle

    def codec_all_reduce(self, comm, codec, inputs, outputs):
        """One array per tensor each."""
        given, made = ((Buffer * len(arrays))(*[buffer(a) for a in arrays]) for arrays in (inputs, outputs))
        call = Call(struct_size=c.sizeof(Call), codec=codec)
        self.call("sotto_all_reduce", comm, given, made, c.c_uint64(len(inputs)), c.byref(call), None)

    def codec_state(self, codec):
        """This rank's residuals, SOTTO_STATE_EXACT: float32 by name of the section (core/state/blob.h)."""
        size = c.c_uint64()
        self.call("sotto_codec_state_export", codec, 1, None, c.c_uint64(0), c.byref(size))
        blob = c.create_string_buffer(size.value)
        self.call("sotto_codec_state_export", codec, 1, blob, size, c.byref(size))
        out, at = {}, 24
        for _ in range(int.from_bytes(blob.raw[12:16], "little")):
            length = int.from_bytes(blob.raw[at : at + 4], "little")
            name, at = blob.raw[at + 4 : at + 4 + length].decode(), at + 4 + length
            count = int.from_bytes(blob.raw[at : at + 8], "little")
            data, at = blob.raw[at + 8 : at + 8 + count], at + 8 + count
            at += -at % 8
            if name.endswith("_error"):
                out[name] = np.frombuffer(data, np.float32)
        return out

    def step(self, optimizer):
        self.call("sotto_optim_step", optimizer, None, None)

    def destroy(self, optimizer):
        self.call("sotto_optim_destroy", optimizer)
