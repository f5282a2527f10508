"""The C interface of libsotto as ctypes: the one module with constants, layouts and signatures.

It is written by hand and held against ``capi/abi/sotto.abi.json`` by ``bindings/abi_check.py``,
name by name. It loads nothing and imports only ctypes, so that the check needs no library. What
every function does, which errors it gives and who owns what is told in the C header.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

SOTTO_ABI_MAJOR = 0
SOTTO_ABI_MINOR = 2
SOTTO_ABI_VERSION = SOTTO_ABI_MAJOR << 16 | SOTTO_ABI_MINOR

SOTTO_OK = 0
SOTTO_IN_PROGRESS = 1
SOTTO_E_INVALID_ARGUMENT = -1
SOTTO_E_INVALID_STATE = -2
SOTTO_E_UNSUPPORTED = -3
SOTTO_E_OUT_OF_MEMORY = -4
SOTTO_E_BUSY = -5
SOTTO_E_TIMEOUT = -6
SOTTO_E_PEER_LOST = -7
SOTTO_E_ABORTED = -8
SOTTO_E_PROTOCOL = -9
SOTTO_E_TRANSPORT = -10
SOTTO_E_DEVICE = -11
SOTTO_E_INTERNAL = -12
SOTTO_E_NONFINITE = -13
SOTTO_E_CANCELLED = -14

SOTTO_INT8 = 0x00010800
SOTTO_INT16 = 0x00011000
SOTTO_INT32 = 0x00012000
SOTTO_INT64 = 0x00014000
SOTTO_UINT8 = 0x00010801
SOTTO_UINT16 = 0x00011001
SOTTO_UINT32 = 0x00012001
SOTTO_UINT64 = 0x00014001
SOTTO_FLOAT16 = 0x00011002
SOTTO_FLOAT32 = 0x00012002
SOTTO_FLOAT64 = 0x00014002
SOTTO_BFLOAT16 = 0x00011004

SOTTO_DEVICE_CPU = 1
SOTTO_DEVICE_CUDA = 2
SOTTO_DEVICE_CUDA_HOST = 3

SOTTO_REDUCE_DEFAULT = 0
SOTTO_REDUCE_SUM = 1
SOTTO_REDUCE_MEAN = 2
SOTTO_REDUCE_MIN = 3
SOTTO_REDUCE_MAX = 4
SOTTO_REDUCE_PROD = 5
SOTTO_REDUCE_BIT_OR = 6

SOTTO_UNIQUE_ID_BYTES = 128
SOTTO_PRIORITY_BACKGROUND = -1000
SOTTO_CALL_DONE_ANY_THREAD = 1
SOTTO_CALL_NO_BLOCK = 2

SOTTO_STATE_CONFIGURED = 0
SOTTO_STATE_EXACT = 1
SOTTO_STATE_RESET = 2
SOTTO_STATE_MEAN = 3
SOTTO_STATE_COMMON = 4
SOTTO_OUTER_LAUNCHED = 1
SOTTO_OUTER_CONSUMED = 2
SOTTO_OUTER_HELD = 4
SOTTO_OUTER_WAITED = 8
SOTTO_OUTER_MEASURING = 16

# Typedefs of numbers.
Status = c.c_int32
Dtype = c.c_uint32
DeviceType = c.c_int32
Reduce = c.c_int32
StateMode = c.c_int32

# Handles are opaque addresses.
Handle = c.c_void_p

DoneFn = c.CFUNCTYPE(None, c.c_void_p, Status)
AllGatherFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p, c.c_uint64, c.c_void_p)
WriteFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p, c.c_uint64)
ReadFn = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint64)
LogFn = c.CFUNCTYPE(None, c.c_void_p, c.c_int32, c.c_char_p)


class Buffer(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("count", c.c_uint64),
        ("dtype", Dtype),
        ("device_type", DeviceType),
        ("device_id", c.c_int32),
        ("flags", c.c_uint32),
    ]


class UniqueId(c.Structure):
    _fields_ = [("bytes", c.c_uint8 * SOTTO_UNIQUE_ID_BYTES)]


class Sized(c.Structure):
    """A struct that starts with its own size, which is set when it is made."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=c.sizeof(type(self)), **fields)


class ContextConfig(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("no_progress_thread", c.c_uint32),
        ("cpu_threads", c.c_uint32),
        ("max_ops", c.c_uint32),
    ]


class CommConfig(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("reserved", c.c_uint32),
        ("id", c.POINTER(UniqueId)),
        ("transport", c.c_char_p),
        ("timeout_us", c.c_int64),
        ("all_gather", AllGatherFn),
        ("user", c.c_void_p),
        ("native_comm", c.c_void_p),
    ]


class Parts(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_uint32),
        ("in_counts", c.POINTER(c.c_uint64)),
        ("in_offsets", c.POINTER(c.c_uint64)),
        ("out_counts", c.POINTER(c.c_uint64)),
        ("out_offsets", c.POINTER(c.c_uint64)),
    ]


class Call(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("tag", c.c_uint64),
        ("stream", c.c_void_p),
        ("timeout_us", c.c_int64),
        ("priority", c.c_int32),
        ("reduce", Reduce),
        ("codec", Handle),
        ("on_done", DoneFn),
        ("user", c.c_void_p),
    ]


class Param(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("group", c.c_uint32),
        ("name", c.c_char_p),
        ("param", Buffer),
        ("grad", Buffer),
        ("model_copy", Buffer),
        ("mask", Buffer),
        ("models", c.c_uint64),
    ]


class NamedArray(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_uint32),
        ("name", c.c_char_p),
        ("values", Buffer),
    ]


class CommCounters(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_uint32),
        ("payload_bytes_sent", c.c_uint64),
        ("payload_bytes_received", c.c_uint64),
        ("header_bytes_sent", c.c_uint64),
        ("header_bytes_received", c.c_uint64),
        ("service_bytes_sent", c.c_uint64),
        ("service_bytes_received", c.c_uint64),
        ("messages_sent", c.c_uint64),
        ("messages_received", c.c_uint64),
        ("payload_bytes_planned", c.c_uint64),
        ("header_bytes_planned", c.c_uint64),
        ("kernel_ns", c.c_uint64),
        ("ops_completed", c.c_uint64),
    ]


class OpStats(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_uint32),
        ("launch_ns", c.c_int64),
        ("start_ns", c.c_int64),
        ("end_ns", c.c_int64),
        ("kernel_ns", c.c_uint64),
        ("payload_bytes_planned", c.c_uint64),
        ("header_bytes_planned", c.c_uint64),
        ("exposed_ns", c.c_int64),
    ]


class OptimInfo(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("stage", c.c_int32),
        ("step", c.c_uint64),
        ("state_step", c.c_uint64),
        ("lr", c.c_double),
        ("grad_norm", c.c_double),
        ("payload_bytes_next_step", c.c_uint64),
        ("header_bytes_next_step", c.c_uint64),
        ("state_bytes", c.c_uint64),
        ("skipped_steps", c.c_uint64),
        ("loss_scale", c.c_double),
        ("micro_batches", c.c_uint64),
    ]


class OuterInfo(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("events", c.c_uint32),
        ("step", c.c_uint64),
        ("round", c.c_uint64),
        ("next_boundary", c.c_uint64),
        ("fragments", c.c_uint32),
        ("in_flight", c.c_uint32),
        ("votes", c.c_uint32),
        ("not_finite", c.c_uint32),
        ("lambda", c.c_double),
        ("gap", c.c_double),
        ("unit", c.c_double),
        ("clip_fraction", c.c_double),
        ("delta_norm", c.c_double),
        ("step_norm", c.c_double),
        ("gain", c.c_double),
        ("overlap_ratio", c.c_double),
        ("contention", c.c_double),
        ("network_ns", c.c_int64),
        ("exposed_ns", c.c_int64),
        ("payload_bytes_next_launch", c.c_uint64),
        ("header_bytes_next_launch", c.c_uint64),
        ("state_bytes", c.c_uint64),
        ("period", c.c_uint64),
        ("delay", c.c_uint64),
        ("loss", c.c_double),
    ]


class OverlapInfo(Sized):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("buckets", c.c_uint32),
        ("rounds", c.c_uint64),
        ("layout", c.c_uint64),
        ("begin_to_last_ready_ns", c.c_int64),
        ("network_ns", c.c_int64),
        ("exposed_ns", c.c_int64),
        ("payload_bytes_per_round", c.c_uint64),
        ("header_bytes_per_round", c.c_uint64),
        ("state_bytes", c.c_uint64),
        ("missing", c.c_uint32),
        ("reserved", c.c_uint32),
        ("early_payload_bytes_per_round", c.c_uint64),
    ]


STRUCTS: dict[str, type[c.Structure]] = {
    "sotto_buffer": Buffer,
    "sotto_call": Call,
    "sotto_comm_config": CommConfig,
    "sotto_comm_counters": CommCounters,
    "sotto_context_config": ContextConfig,
    "sotto_named_array": NamedArray,
    "sotto_op_stats": OpStats,
    "sotto_optim_info": OptimInfo,
    "sotto_outer_info": OuterInfo,
    "sotto_overlap_info": OverlapInfo,
    "sotto_param": Param,
    "sotto_parts": Parts,
    "sotto_unique_id": UniqueId,
}

TYPEDEFS: dict[str, Any] = {
    "sotto_all_gather_fn": AllGatherFn,
    "sotto_device_type": DeviceType,
    "sotto_done_fn": DoneFn,
    "sotto_dtype": Dtype,
    "sotto_log_fn": LogFn,
    "sotto_read_fn": ReadFn,
    "sotto_reduce_op": Reduce,
    "sotto_state_mode": StateMode,
    "sotto_status": Status,
    "sotto_write_fn": WriteFn,
}

HANDLES = (
    "sotto_codec",
    "sotto_comm",
    "sotto_context",
    "sotto_op",
    "sotto_optim",
    "sotto_outer",
    "sotto_overlap",
)

_Buffers = c.POINTER(Buffer)
_CallIn = c.POINTER(Call)
_Handles = c.POINTER(Handle)
_Text = c.c_char_p
_TextOut = c.POINTER(c.c_char_p)
_Bytes = c.c_void_p
_Count = c.c_uint64
_CountOut = c.POINTER(c.c_uint64)
_Numbers = c.POINTER(c.c_uint64)
_NumberOut = c.POINTER(c.c_int32)

# Argument lists that several functions share.
_IN_OUT = [Handle, _Buffers, _Buffers, _Count]
_REPORT = [Handle, _Text, _Bytes, _Count, _CountOut]
_CALL_OP = [_CallIn, _Handles]

# name: (result, arguments)
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "sotto_abi_version": (c.c_uint32, []),
    "sotto_version_string": (_Text, []),
    "sotto_build_info": (_Text, []),
    "sotto_status_name": (_Text, [Status]),
    "sotto_last_error": (_Text, []),
    "sotto_set_log": (Status, [LogFn, c.c_void_p, c.c_int32]),
    "sotto_context_create_v": (Status, [c.c_uint32, c.POINTER(ContextConfig), _Handles]),
    "sotto_context_destroy": (Status, [Handle]),
    "sotto_context_poll": (Status, [Handle, c.c_int64]),
    "sotto_context_report": (Status, _REPORT),
    "sotto_unique_id_create": (Status, [Handle, c.POINTER(UniqueId)]),
    "sotto_comm_create": (Status, [Handle, c.POINTER(CommConfig), _Handles]),
    "sotto_comm_split": (Status, [Handle, c.c_int32, c.c_int32, _Handles]),
    "sotto_comm_rank": (Status, [Handle, _NumberOut]),
    "sotto_comm_size": (Status, [Handle, _NumberOut]),
    "sotto_comm_abort": (Status, [Handle, _Text]),
    "sotto_comm_error": (Status, [Handle, _TextOut]),
    "sotto_comm_report": (Status, _REPORT),
    "sotto_comm_get_counters": (Status, [Handle, c.POINTER(CommCounters)]),
    "sotto_comm_destroy": (Status, [Handle]),
    "sotto_op_test": (Status, [Handle]),
    "sotto_op_wait": (Status, [Handle, c.c_int64]),
    "sotto_op_wait_any": (Status, [_Handles, _Count, c.c_int64, _CountOut]),
    "sotto_op_wait_all": (Status, [_Handles, _Count, c.c_int64]),
    "sotto_op_stream_wait": (Status, [Handle, c.c_void_p]),
    "sotto_op_error": (Status, [Handle, _TextOut]),
    "sotto_trace_span": (Status, [Handle, _Text, c.c_int64, c.c_int64]),
    "sotto_op_get_stats": (Status, [Handle, c.POINTER(OpStats)]),
    "sotto_op_release": (Status, [Handle]),
    "sotto_barrier": (Status, [Handle, *_CALL_OP]),
    "sotto_broadcast": (Status, [*_IN_OUT, c.c_int32, *_CALL_OP]),
    "sotto_all_gather": (Status, [*_IN_OUT, *_CALL_OP]),
    "sotto_all_gather_v": (Status, [*_IN_OUT, c.POINTER(Parts), *_CALL_OP]),
    "sotto_reduce_scatter": (Status, [*_IN_OUT, *_CALL_OP]),
    "sotto_reduce_scatter_v": (Status, [*_IN_OUT, c.POINTER(Parts), *_CALL_OP]),
    "sotto_reduce": (Status, [*_IN_OUT, c.c_int32, *_CALL_OP]),
    "sotto_all_reduce": (Status, [*_IN_OUT, *_CALL_OP]),
    "sotto_gather": (Status, [*_IN_OUT, c.c_int32, *_CALL_OP]),
    "sotto_scatter": (Status, [*_IN_OUT, c.c_int32, *_CALL_OP]),
    "sotto_all_to_all": (Status, [*_IN_OUT, c.POINTER(Parts), *_CALL_OP]),
    "sotto_send": (Status, [Handle, _Buffers, _Count, c.c_int32, *_CALL_OP]),
    "sotto_recv": (Status, [Handle, _Buffers, _Count, c.c_int32, *_CALL_OP]),
    "sotto_group_begin": (Status, [Handle]),
    "sotto_group_end": (Status, [Handle, *_CALL_OP]),
    "sotto_codec_create": (Status, [Handle, _Text, _Buffers, _Count, _Handles]),
    "sotto_codec_destroy": (Status, [Handle]),
    "sotto_codec_state_export": (Status, [Handle, StateMode, _Bytes, _Count, _CountOut]),
    "sotto_codec_state_import": (Status, [Handle, StateMode, _Bytes, _Count]),
    "sotto_plan_report": (Status, _REPORT),
    "sotto_config_report": (Status, [_Text, c.c_int32, c.c_uint64, _Bytes, _Count, _CountOut]),
    "sotto_config_resolve": (Status, [_Text, _Text, _Bytes, _Count, _CountOut]),
    "sotto_optim_create": (Status, [Handle, _Text, c.POINTER(Param), _Count, _Handles]),
    "sotto_optim_step": (Status, [Handle, *_CALL_OP]),
    "sotto_optim_replay": (Status, [Handle, Handle]),
    "sotto_optim_accumulate": (Status, [Handle, *_CALL_OP]),
    "sotto_optim_set": (Status, [Handle, _Text, c.c_int32, c.c_double]),
    "sotto_optim_set_grads": (Status, [Handle, c.POINTER(Buffer), _Count]),
    "sotto_optim_get_info": (Status, [Handle, c.POINTER(OptimInfo)]),
    "sotto_optim_report": (Status, _REPORT),
    "sotto_optim_state_export": (Status, [Handle, StateMode, _Bytes, _Count, _CountOut]),
    "sotto_optim_state_import": (Status, [Handle, StateMode, _Bytes, _Count]),
    "sotto_optim_state_import_arrays": (Status, [Handle, c.POINTER(NamedArray), _Count]),
    "sotto_optim_set_params": (Status, [Handle, c.POINTER(Buffer), c.POINTER(Buffer), _Count]),
    "sotto_optim_set_frozen": (Status, [Handle, c.POINTER(c.c_uint8), _Count]),
    "sotto_optim_destroy": (Status, [Handle]),
    "sotto_optim_synchronize": (Status, [Handle, *_CALL_OP]),
    "sotto_optim_state_write": (Status, [Handle, StateMode, WriteFn, c.c_void_p]),
    "sotto_optim_state_read": (Status, [Handle, StateMode, ReadFn, c.c_void_p, _Count]),
    "sotto_optim_set_user_state": (Status, [Handle, _Bytes, _Count]),
    "sotto_optim_get_user_state": (Status, [Handle, _Bytes, _Count, _CountOut]),
    "sotto_outer_create": (Status, [Handle, _Text, c.POINTER(Param), _Count, _Handles]),
    "sotto_outer_create_sharded": (
        Status,
        [Handle, Handle, _Text, c.POINTER(Param), _Count, _Handles],
    ),
    "sotto_outer_set": (Status, [Handle, _Text, c.c_double]),
    "sotto_optim_outer": (Status, [Handle, c.POINTER(Handle)]),
    "sotto_outer_set_params": (Status, [Handle, c.POINTER(Buffer), c.POINTER(Buffer), _Count]),
    "sotto_outer_step": (Status, [Handle, *_CALL_OP]),
    "sotto_outer_flush": (Status, [Handle, *_CALL_OP]),
    "sotto_outer_swap": (Status, [Handle, *_CALL_OP]),
    "sotto_outer_vote": (Status, [Handle, c.c_uint32]),
    "sotto_outer_state_export": (Status, [Handle, StateMode, _Bytes, _Count, _CountOut]),
    "sotto_outer_state_import": (Status, [Handle, StateMode, _Bytes, _Count]),
    "sotto_outer_get_info": (Status, [Handle, c.POINTER(OuterInfo)]),
    "sotto_outer_destroy": (Status, [Handle]),
    "sotto_predict_report": (Status, [_Text, _Bytes, _Count, _CountOut]),
    "sotto_overlap_create": (Status, [Handle, _Text, _Buffers, _Count, _Handles]),
    "sotto_overlap_create_step": (Status, [Handle, _Text, _Handles]),
    "sotto_overlap_begin": (Status, [Handle, *_CALL_OP]),
    "sotto_overlap_ready": (Status, [Handle, _Numbers, _Buffers, _Count, c.c_void_p]),
    "sotto_overlap_unused": (Status, [Handle, _Numbers, _Count]),
    "sotto_overlap_finish": (Status, [Handle]),
    "sotto_overlap_withdraw": (Status, [Handle, _Text]),
    "sotto_overlap_get_info": (Status, [Handle, c.POINTER(OverlapInfo)]),
    "sotto_overlap_report": (Status, _REPORT),
    "sotto_overlap_state_export": (Status, [Handle, StateMode, _Bytes, _Count, _CountOut]),
    "sotto_overlap_state_import": (Status, [Handle, StateMode, _Bytes, _Count]),
    "sotto_overlap_destroy": (Status, [Handle]),
}

CONSTANTS: dict[str, int] = {
    name: value for name, value in globals().items() if name.startswith("SOTTO_")
}
