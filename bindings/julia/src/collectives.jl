# Collectives. Arrays are used as they are, in column-major order: only counts and types have to
# agree between ranks.

const REDUCTIONS = Dict(
    :sum => SOTTO_REDUCE_SUM, :mean => SOTTO_REDUCE_MEAN, :min => SOTTO_REDUCE_MIN,
    :max => SOTTO_REDUCE_MAX, :prod => SOTTO_REDUCE_PROD, :bit_or => SOTTO_REDUCE_BIT_OR,
)

function call_of(; op = nothing, tag = 0, timeout = nothing, priority = 0, codec = C_NULL)
    op === nothing || haskey(REDUCTIONS, op) ||
        invalid("op is $(repr(op)); allowed: $(join(map(repr, sort!(collect(keys(REDUCTIONS)))), ", "))")
    reduce = op === nothing ? SOTTO_REDUCE_DEFAULT : REDUCTIONS[op]
    return Ref(made(sotto_call; tag = tag, timeout_us = microseconds(timeout), priority = priority,
        reduce = reduce, codec = codec))
end

"One collective: call(comm, in, out, n, rest...) of the library, where rest ends with call, out_op."
function collective(f, comm::Comm, x, out, rest...; keep = nothing, options...)
    call = call_of(; options...)
    arrays, inputs = arrays_of(x, "x")
    results, outputs = out === x ? (arrays, inputs) : arrays_of(out, "out")
    length(inputs) == length(outputs) ||
        invalid("x has $(counted(length(inputs), "array")) and out has $(length(outputs)); they have to be as many")
    started(comm, (arrays, results, keep)) do out_op
        f(handle_of(comm), inputs, outputs, length(inputs), rest..., call, out_op)
    end
end

"""
    barrier(comm; tag, timeout)

Completes on a rank when every rank has called it. All collectives return an [`Op`](@ref) at once:
`wait` for it. Options that all of them have: `tag` (equal on all ranks), `timeout` (seconds),
`priority`. `x` is an array or a vector or tuple of arrays, which then are one operation.
"""
function barrier(comm::Comm; options...)
    call = call_of(; options...)
    started(out_op -> sotto_barrier(handle_of(comm), call, out_op), comm, nothing)
end

"""
    all_reduce!(comm, x; op = :sum, codec = nothing)
    all_reduce!(comm, x, out; ...)

The reduction of `x` over ranks, in `out` or in its own place, with the same bits on all ranks.
`op`: `:sum`, `:mean`, `:min`, `:max`, `:prod`, `:bit_or`. With a [`Codec`](@ref) it is the
error-compensated mean.
"""
function all_reduce!(comm::Comm, x, out = x; codec = nothing, options...)
    codec === nothing && return collective(sotto_all_reduce, comm, x, out; options...)
    get(options, :op, :mean) === :mean || invalid("op is $(repr(options[:op])); with a codec the result is the mean")
    rest = Dict(key => value for (key, value) in options if key !== :op)
    return collective(sotto_all_reduce, comm, x, out; keep = codec, codec = handle_of(codec), rest...)
end

"Copies the root's `x` over that of all ranks."
broadcast!(comm::Comm, x, root::Integer = 0; options...) =
    collective(sotto_broadcast, comm, x, x, root; options...)

"`out` = concatenation of `x` over ranks: as many times as many elements as there are ranks."
all_gather!(comm::Comm, x, out; options...) = collective(sotto_all_gather, comm, x, out; options...)

"`out` = this rank's part of the reduction of `x`, which has as many times as many elements as ranks."
reduce_scatter!(comm::Comm, x, out; options...) =
    collective(sotto_reduce_scatter, comm, x, out; options...)

"`out` on the root = reduction of `x` over ranks; elsewhere `out` stays as it is."
reduce!(comm::Comm, x, out, root::Integer = 0; options...) =
    collective(sotto_reduce, comm, x, out, root; options...)

"Sends `x` to a rank, which calls [`recv!`](@ref) with as many elements of the same type."
send(comm::Comm, x, peer::Integer; options...) = point_to_point(sotto_send, comm, x, "x", peer; options...)

"Receives from a rank what it sends with [`send`](@ref)."
recv!(comm::Comm, out, peer::Integer; options...) =
    point_to_point(sotto_recv, comm, out, "out", peer; options...)

function point_to_point(f, comm, x, what, peer; options...)
    call = call_of(; options...)
    arrays, buffers = arrays_of(x, what)
    started(comm, arrays) do out_op
        f(handle_of(comm), buffers, length(buffers), peer, call, out_op)
    end
end
