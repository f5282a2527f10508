# The C interface as it is: constants, types and functions of `sotto.h`, under their own names.
# `bindings/abi_check.py` holds this file against the snapshot of the interface. What a function
# does is said in the header.

const SOTTO_ABI_MAJOR = 0
const SOTTO_ABI_MINOR = 2
const SOTTO_ABI_VERSION = 2
const SOTTO_BFLOAT16 = 69636
const SOTTO_CALL_DONE_ANY_THREAD = 1
const SOTTO_CALL_NO_BLOCK = 2
const SOTTO_DEVICE_CPU = 1
const SOTTO_DEVICE_CUDA = 2
const SOTTO_DEVICE_CUDA_HOST = 3
const SOTTO_E_ABORTED = -8
const SOTTO_E_BUSY = -5
const SOTTO_E_CANCELLED = -14
const SOTTO_E_DEVICE = -11
const SOTTO_E_INTERNAL = -12
const SOTTO_E_INVALID_ARGUMENT = -1
const SOTTO_E_INVALID_STATE = -2
const SOTTO_E_NONFINITE = -13
const SOTTO_E_OUT_OF_MEMORY = -4
const SOTTO_E_PEER_LOST = -7
const SOTTO_E_PROTOCOL = -9
const SOTTO_E_TIMEOUT = -6
const SOTTO_E_TRANSPORT = -10
const SOTTO_E_UNSUPPORTED = -3
const SOTTO_FLOAT16 = 69634
const SOTTO_FLOAT32 = 73730
const SOTTO_FLOAT64 = 81922
const SOTTO_INT16 = 69632
const SOTTO_INT32 = 73728
const SOTTO_INT64 = 81920
const SOTTO_INT8 = 67584
const SOTTO_IN_PROGRESS = 1
const SOTTO_OK = 0
const SOTTO_OUTER_CONSUMED = 2
const SOTTO_OUTER_HELD = 4
const SOTTO_OUTER_LAUNCHED = 1
const SOTTO_OUTER_MEASURING = 16
const SOTTO_OUTER_WAITED = 8
const SOTTO_PRIORITY_BACKGROUND = -1000
const SOTTO_REDUCE_BIT_OR = 6
const SOTTO_REDUCE_DEFAULT = 0
const SOTTO_REDUCE_MAX = 4
const SOTTO_REDUCE_MEAN = 2
const SOTTO_REDUCE_MIN = 3
const SOTTO_REDUCE_PROD = 5
const SOTTO_REDUCE_SUM = 1
const SOTTO_STATE_COMMON = 4
const SOTTO_STATE_CONFIGURED = 0
const SOTTO_STATE_EXACT = 1
const SOTTO_STATE_MEAN = 3
const SOTTO_STATE_RESET = 2
const SOTTO_UINT16 = 69633
const SOTTO_UINT32 = 73729
const SOTTO_UINT64 = 81921
const SOTTO_UINT8 = 67585
const SOTTO_UNIQUE_ID_BYTES = 128

const sotto_all_gather_fn = Ptr{Cvoid}
const sotto_device_type = Int32
const sotto_done_fn = Ptr{Cvoid}
const sotto_dtype = UInt32
const sotto_log_fn = Ptr{Cvoid}
const sotto_read_fn = Ptr{Cvoid}
const sotto_reduce_op = Int32
const sotto_state_mode = Int32
const sotto_status = Int32
const sotto_write_fn = Ptr{Cvoid}

# Handles: addresses of what the library alone knows.
mutable struct sotto_codec end
mutable struct sotto_comm end
mutable struct sotto_context end
mutable struct sotto_op end
mutable struct sotto_optim end
mutable struct sotto_outer end
mutable struct sotto_overlap end

struct sotto_buffer
    data::Ptr{Cvoid}
    count::UInt64
    dtype::sotto_dtype
    device_type::sotto_device_type
    device_id::Int32
    flags::UInt32
end

struct sotto_call
    struct_size::UInt32
    flags::UInt32
    tag::UInt64
    stream::Ptr{Cvoid}
    timeout_us::Int64
    priority::Int32
    reduce::sotto_reduce_op
    codec::Ptr{sotto_codec}
    on_done::sotto_done_fn
    user::Ptr{Cvoid}
end

struct sotto_unique_id
    bytes::NTuple{128, UInt8}
end

struct sotto_comm_config
    struct_size::UInt32
    rank::Int32
    size::Int32
    reserved::UInt32
    id::Ptr{sotto_unique_id}
    transport::Cstring
    timeout_us::Int64
    all_gather::sotto_all_gather_fn
    user::Ptr{Cvoid}
    native_comm::Ptr{Cvoid}
end

struct sotto_comm_counters
    struct_size::UInt32
    reserved::UInt32
    payload_bytes_sent::UInt64
    payload_bytes_received::UInt64
    header_bytes_sent::UInt64
    header_bytes_received::UInt64
    service_bytes_sent::UInt64
    service_bytes_received::UInt64
    messages_sent::UInt64
    messages_received::UInt64
    payload_bytes_planned::UInt64
    header_bytes_planned::UInt64
    kernel_ns::UInt64
    ops_completed::UInt64
end

struct sotto_context_config
    struct_size::UInt32
    no_progress_thread::UInt32
    cpu_threads::UInt32
    max_ops::UInt32
end

struct sotto_named_array
    struct_size::UInt32
    reserved::UInt32
    name::Cstring
    values::sotto_buffer
end

struct sotto_op_stats
    struct_size::UInt32
    reserved::UInt32
    launch_ns::Int64
    start_ns::Int64
    end_ns::Int64
    kernel_ns::UInt64
    payload_bytes_planned::UInt64
    header_bytes_planned::UInt64
    exposed_ns::Int64
end

struct sotto_optim_info
    struct_size::UInt32
    stage::Int32
    step::UInt64
    state_step::UInt64
    lr::Float64
    grad_norm::Float64
    payload_bytes_next_step::UInt64
    header_bytes_next_step::UInt64
    state_bytes::UInt64
    skipped_steps::UInt64
    loss_scale::Float64
    micro_batches::UInt64
end

struct sotto_outer_info
    struct_size::UInt32
    events::UInt32
    step::UInt64
    round::UInt64
    next_boundary::UInt64
    fragments::UInt32
    in_flight::UInt32
    votes::UInt32
    not_finite::UInt32
    lambda::Float64
    gap::Float64
    unit::Float64
    clip_fraction::Float64
    delta_norm::Float64
    step_norm::Float64
    gain::Float64
    overlap_ratio::Float64
    contention::Float64
    network_ns::Int64
    exposed_ns::Int64
    payload_bytes_next_launch::UInt64
    header_bytes_next_launch::UInt64
    state_bytes::UInt64
    period::UInt64
    delay::UInt64
    loss::Float64
end

struct sotto_overlap_info
    struct_size::UInt32
    buckets::UInt32
    rounds::UInt64
    layout::UInt64
    begin_to_last_ready_ns::Int64
    network_ns::Int64
    exposed_ns::Int64
    payload_bytes_per_round::UInt64
    header_bytes_per_round::UInt64
    state_bytes::UInt64
    missing::UInt32
    reserved::UInt32
    early_payload_bytes_per_round::UInt64
end

struct sotto_param
    struct_size::UInt32
    group::UInt32
    name::Cstring
    param::sotto_buffer
    grad::sotto_buffer
    model_copy::sotto_buffer
    mask::sotto_buffer
    models::UInt64
end

struct sotto_parts
    struct_size::UInt32
    reserved::UInt32
    in_counts::Ptr{UInt64}
    in_offsets::Ptr{UInt64}
    out_counts::Ptr{UInt64}
    out_offsets::Ptr{UInt64}
end

@c_function sotto_abi_version()::UInt32
@c_function sotto_all_gather(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_all_gather_v(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    parts::Ptr{sotto_parts}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_all_reduce(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_all_to_all(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    parts::Ptr{sotto_parts}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_barrier(
    comm::Ptr{sotto_comm}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_broadcast(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    root::Int32, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_build_info()::Cstring
@c_function sotto_codec_create(
    comm::Ptr{sotto_comm}, json::Cstring, like::Ptr{sotto_buffer}, n::UInt64,
    out_codec::Ptr{Ptr{sotto_codec}}
)::sotto_status
@c_function sotto_codec_destroy(codec::Ptr{sotto_codec})::sotto_status
@c_function sotto_codec_state_export(
    codec::Ptr{sotto_codec}, mode::sotto_state_mode, buf::Ptr{Cvoid}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_codec_state_import(
    codec::Ptr{sotto_codec}, mode::sotto_state_mode, buf::Ptr{Cvoid}, len::UInt64
)::sotto_status
@c_function sotto_comm_abort(comm::Ptr{sotto_comm}, reason::Cstring)::sotto_status
@c_function sotto_comm_create(
    context::Ptr{sotto_context}, config::Ptr{sotto_comm_config},
    out_comm::Ptr{Ptr{sotto_comm}}
)::sotto_status
@c_function sotto_comm_destroy(comm::Ptr{sotto_comm})::sotto_status
@c_function sotto_comm_error(comm::Ptr{sotto_comm}, out_text::Ptr{Cstring})::sotto_status
@c_function sotto_comm_get_counters(
    comm::Ptr{sotto_comm}, out_counters::Ptr{sotto_comm_counters}
)::sotto_status
@c_function sotto_comm_rank(comm::Ptr{sotto_comm}, out_rank::Ptr{Int32})::sotto_status
@c_function sotto_comm_report(
    comm::Ptr{sotto_comm}, kind::Cstring, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_comm_size(comm::Ptr{sotto_comm}, out_size::Ptr{Int32})::sotto_status
@c_function sotto_comm_split(
    comm::Ptr{sotto_comm}, color::Int32, key::Int32, out_comm::Ptr{Ptr{sotto_comm}}
)::sotto_status
@c_function sotto_config_report(
    json::Cstring, world_size::Int32, n_params::UInt64, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_config_resolve(
    json::Cstring, values::Cstring, buf::Ptr{UInt8}, cap::UInt64, out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_context_create_v(
    abi_version::UInt32, config::Ptr{sotto_context_config},
    out_context::Ptr{Ptr{sotto_context}}
)::sotto_status
@c_function sotto_context_destroy(context::Ptr{sotto_context})::sotto_status
@c_function sotto_context_poll(context::Ptr{sotto_context}, timeout_us::Int64)::sotto_status
@c_function sotto_context_report(
    context::Ptr{sotto_context}, kind::Cstring, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_gather(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    root::Int32, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_group_begin(comm::Ptr{sotto_comm})::sotto_status
@c_function sotto_group_end(
    comm::Ptr{sotto_comm}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_last_error()::Cstring
@c_function sotto_op_error(op::Ptr{sotto_op}, out_text::Ptr{Cstring})::sotto_status
@c_function sotto_op_get_stats(
    op::Ptr{sotto_op}, out_stats::Ptr{sotto_op_stats}
)::sotto_status
@c_function sotto_op_release(op::Ptr{sotto_op})::sotto_status
@c_function sotto_op_stream_wait(op::Ptr{sotto_op}, stream::Ptr{Cvoid})::sotto_status
@c_function sotto_op_test(op::Ptr{sotto_op})::sotto_status
@c_function sotto_op_wait(op::Ptr{sotto_op}, timeout_us::Int64)::sotto_status
@c_function sotto_op_wait_all(
    ops::Ptr{Ptr{sotto_op}}, n::UInt64, timeout_us::Int64
)::sotto_status
@c_function sotto_op_wait_any(
    ops::Ptr{Ptr{sotto_op}}, n::UInt64, timeout_us::Int64, out_index::Ptr{UInt64}
)::sotto_status
@c_function sotto_optim_accumulate(
    optim::Ptr{sotto_optim}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_optim_create(
    comm::Ptr{sotto_comm}, json::Cstring, params::Ptr{sotto_param}, n::UInt64,
    out_optim::Ptr{Ptr{sotto_optim}}
)::sotto_status
@c_function sotto_optim_destroy(optim::Ptr{sotto_optim})::sotto_status
@c_function sotto_optim_get_info(
    optim::Ptr{sotto_optim}, out_info::Ptr{sotto_optim_info}
)::sotto_status
@c_function sotto_optim_get_user_state(
    optim::Ptr{sotto_optim}, buf::Ptr{Cvoid}, cap::UInt64, out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_optim_outer(
    optim::Ptr{sotto_optim}, out_outer::Ptr{Ptr{sotto_outer}}
)::sotto_status
@c_function sotto_optim_replay(optim::Ptr{sotto_optim}, op::Ptr{sotto_op})::sotto_status
@c_function sotto_optim_report(
    optim::Ptr{sotto_optim}, kind::Cstring, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_optim_set(
    optim::Ptr{sotto_optim}, name::Cstring, group::Int32, value::Float64
)::sotto_status
@c_function sotto_optim_set_frozen(
    optim::Ptr{sotto_optim}, frozen::Ptr{UInt8}, n::UInt64
)::sotto_status
@c_function sotto_optim_set_grads(
    optim::Ptr{sotto_optim}, grads::Ptr{sotto_buffer}, n::UInt64
)::sotto_status
@c_function sotto_optim_set_params(
    optim::Ptr{sotto_optim}, params::Ptr{sotto_buffer}, model_copies::Ptr{sotto_buffer},
    n::UInt64
)::sotto_status
@c_function sotto_optim_set_user_state(
    optim::Ptr{sotto_optim}, data::Ptr{Cvoid}, len::UInt64
)::sotto_status
@c_function sotto_optim_state_export(
    optim::Ptr{sotto_optim}, mode::sotto_state_mode, buf::Ptr{Cvoid}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_optim_state_import(
    optim::Ptr{sotto_optim}, mode::sotto_state_mode, buf::Ptr{Cvoid}, len::UInt64
)::sotto_status
@c_function sotto_optim_state_import_arrays(
    optim::Ptr{sotto_optim}, arrays::Ptr{sotto_named_array}, n::UInt64
)::sotto_status
@c_function sotto_optim_state_read(
    optim::Ptr{sotto_optim}, mode::sotto_state_mode, read::sotto_read_fn, user::Ptr{Cvoid},
    len::UInt64
)::sotto_status
@c_function sotto_optim_state_write(
    optim::Ptr{sotto_optim}, mode::sotto_state_mode, write::sotto_write_fn,
    user::Ptr{Cvoid}
)::sotto_status
@c_function sotto_optim_step(
    optim::Ptr{sotto_optim}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_optim_synchronize(
    optim::Ptr{sotto_optim}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_outer_create(
    comm::Ptr{sotto_comm}, json::Cstring, params::Ptr{sotto_param}, n::UInt64,
    out_outer::Ptr{Ptr{sotto_outer}}
)::sotto_status
@c_function sotto_outer_create_sharded(
    comm::Ptr{sotto_comm}, shards::Ptr{sotto_comm}, json::Cstring, params::Ptr{sotto_param}, n::UInt64,
    out_outer::Ptr{Ptr{sotto_outer}}
)::sotto_status
@c_function sotto_outer_destroy(outer::Ptr{sotto_outer})::sotto_status
@c_function sotto_outer_flush(
    outer::Ptr{sotto_outer}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_outer_get_info(
    outer::Ptr{sotto_outer}, out_info::Ptr{sotto_outer_info}
)::sotto_status
@c_function sotto_outer_set(
    outer::Ptr{sotto_outer}, name::Cstring, value::Float64
)::sotto_status
@c_function sotto_outer_set_params(
    outer::Ptr{sotto_outer}, params::Ptr{sotto_buffer}, model_copies::Ptr{sotto_buffer},
    n::UInt64
)::sotto_status
@c_function sotto_outer_state_export(
    outer::Ptr{sotto_outer}, mode::sotto_state_mode, buf::Ptr{Cvoid}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_outer_state_import(
    outer::Ptr{sotto_outer}, mode::sotto_state_mode, buf::Ptr{Cvoid}, len::UInt64
)::sotto_status
@c_function sotto_outer_step(
    outer::Ptr{sotto_outer}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_outer_swap(
    outer::Ptr{sotto_outer}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_outer_vote(outer::Ptr{sotto_outer}, bits::UInt32)::sotto_status
@c_function sotto_overlap_begin(
    overlap::Ptr{sotto_overlap}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_overlap_create(
    comm::Ptr{sotto_comm}, json::Cstring, like::Ptr{sotto_buffer}, n::UInt64,
    out_overlap::Ptr{Ptr{sotto_overlap}}
)::sotto_status
@c_function sotto_overlap_create_step(
    optim::Ptr{sotto_optim}, json::Cstring, out_overlap::Ptr{Ptr{sotto_overlap}}
)::sotto_status
@c_function sotto_overlap_destroy(overlap::Ptr{sotto_overlap})::sotto_status
@c_function sotto_overlap_finish(overlap::Ptr{sotto_overlap})::sotto_status
@c_function sotto_overlap_get_info(
    overlap::Ptr{sotto_overlap}, out_info::Ptr{sotto_overlap_info}
)::sotto_status
@c_function sotto_overlap_ready(
    overlap::Ptr{sotto_overlap}, indices::Ptr{UInt64}, grads::Ptr{sotto_buffer}, n::UInt64,
    stream::Ptr{Cvoid}
)::sotto_status
@c_function sotto_overlap_report(
    overlap::Ptr{sotto_overlap}, kind::Cstring, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_overlap_state_export(
    overlap::Ptr{sotto_overlap}, mode::sotto_state_mode, buf::Ptr{Cvoid}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_overlap_state_import(
    overlap::Ptr{sotto_overlap}, mode::sotto_state_mode, buf::Ptr{Cvoid}, len::UInt64
)::sotto_status
@c_function sotto_overlap_unused(
    overlap::Ptr{sotto_overlap}, indices::Ptr{UInt64}, n::UInt64
)::sotto_status
@c_function sotto_overlap_withdraw(
    overlap::Ptr{sotto_overlap}, reason::Cstring
)::sotto_status
@c_function sotto_plan_report(
    comm::Ptr{sotto_comm}, request::Cstring, buf::Ptr{UInt8}, cap::UInt64,
    out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_predict_report(
    json::Cstring, buf::Ptr{UInt8}, cap::UInt64, out_len::Ptr{UInt64}
)::sotto_status
@c_function sotto_recv(
    comm::Ptr{sotto_comm}, out::Ptr{sotto_buffer}, n::UInt64, peer::Int32,
    call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_reduce(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    root::Int32, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_reduce_scatter(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_reduce_scatter_v(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    parts::Ptr{sotto_parts}, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_scatter(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, out::Ptr{sotto_buffer}, n::UInt64,
    root::Int32, call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_send(
    comm::Ptr{sotto_comm}, in::Ptr{sotto_buffer}, n::UInt64, peer::Int32,
    call::Ptr{sotto_call}, out_op::Ptr{Ptr{sotto_op}}
)::sotto_status
@c_function sotto_set_log(fn::sotto_log_fn, user::Ptr{Cvoid}, level::Int32)::sotto_status
@c_function sotto_status_name(status::sotto_status)::Cstring
@c_function sotto_trace_span(
    context::Ptr{sotto_context}, name::Cstring, begin_ns::Int64, end_ns::Int64
)::sotto_status
@c_function sotto_unique_id_create(
    context::Ptr{sotto_context}, out_id::Ptr{sotto_unique_id}
)::sotto_status
@c_function sotto_version_string()::Cstring
