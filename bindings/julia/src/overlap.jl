# Gradients that are averaged, or used for a step, while others are still being computed.

"""
    Overlap(comm, gradients, config = "{}"; moving = name -> false)

Averages gradients over ranks, each as soon as it is ready. Collective: all ranks make the same.

  - `gradients`: a vector or tuple of arrays, or a tree as [`parameters`](@ref) lists it; of
    `Float32`, `Float16` or bfloat16. They have to stay where they are until `close`
  - `config`: JSON text, `{"bucket_bytes": 26214400, "unused": "zero"}`: the keys of
    `sotto_overlap_create`
  - `moving`: a function from the name to whether the gradient lies elsewhere in every round. Its
    array then says no more than type and length, and every [`ready!`](@ref) gives another one

A round is [`begin!`](@ref), [`ready!`](@ref) or [`unused!`](@ref) for every gradient, [`finish!`](@ref),
and `wait` for what `begin!` has returned. Errors: `:InvalidArgument` (names the key or the gradient),
`:Unsupported`, `:Protocol` (ranks differ). Threads: `ready!` and `unused!` any, at the same time; the
rest one at a time.

    Overlap(optimizer, config = nothing)

Rounds that are steps of an [`Optimizer`](@ref), which begin before its gradients are there and have
the bits of its `step!`. Gradients have the names of its parameters, and every `ready!` gives their
arrays. `config`: `nothing`: `"sotto": {"overlap": {...}}` of the optimizer's configuration, or the
defaults. Until a round has ended the optimizer is `:Busy`. Errors: also `:Unsupported`
(`"sotto": {"outer": {...}}`, mode compat), `:Busy` (a step in flight).
"""
mutable struct Overlap <: Owned
    comm::Comm
    handle::Ptr{sotto_overlap}
    names::Vector{String}
    numbers::Dict{String,Int}  # of names, from 1
    arrays::Vector{Union{Nothing,AbstractArray}}  # nothing: every round says where it is
    optimizer::Union{Nothing,Optimizer}  # whose steps the rounds are
    round::Union{Nothing,Flight}  # the last one
    lock::ReentrantLock  # of what the round keeps alive
    function Overlap(comm::Comm, gradients, config::AbstractString = "{}"; moving = name -> false)
        found = gradients_in(gradients)
        isempty(found) && invalid("gradients, a $(typeof(gradients)), have no array of floating-point numbers")
        names = String[first(pair) for pair in found]
        numbers = numbered(names)
        arrays = Union{Nothing,AbstractArray}[moving(name) ? nothing : x for (name, x) in found]
        out = Ref{Ptr{sotto_overlap}}(C_NULL)
        GC.@preserve arrays begin
            like = [x === nothing ? made(sotto_buffer; count = length(each), dtype = dtype(eltype(each)),
                        device_type = SOTTO_DEVICE_CPU) : buffer_of(x, "gradient \"$name\"")
                    for (x, (name, each)) in zip(arrays, found)]
            one_call(comm) do
                reap(comm)
                check(sotto_overlap_create(handle_of(comm), config, like, length(like), out))
            end
        end
        return own(new(comm, out[], names, numbers, arrays, nothing, nothing, ReentrantLock()))
    end
    function Overlap(optimizer::Optimizer, config::Union{Nothing,AbstractString} = nothing)
        out = Ref{Ptr{sotto_overlap}}(C_NULL)
        json = config === nothing ? Cstring(C_NULL) : config
        one_call(optimizer.comm) do
            reap(optimizer.comm)
            check(sotto_overlap_create_step(handle_of(optimizer), json, out))
        end
        names = optimizer.names
        return own(new(optimizer.comm, out[], names, numbered(names), fill(nothing, length(names)), optimizer,
            nothing, ReentrantLock()))
    end
end

"All arrays of a list, or those that `parameters` finds in a tree, with names."
function gradients_in(x)
    x isa Union{Tuple,AbstractVector} && all(each -> each isa AbstractArray{<:Number}, x) || return parameters(x)
    return Pair{String,AbstractArray}[string(i) => each for (i, each) in enumerate(x)]
end

function numbered(names)
    numbers = Dict{String,Int}(name => i for (i, name) in enumerate(names))
    twice = findfirst(i -> numbers[names[i]] != i, eachindex(names))
    twice === nothing || invalid("two gradients have the name \"$(names[twice])\"")
    return numbers
end

destroy(::Type{Overlap}, handle) = sotto_overlap_destroy(handle)
works_on(overlap::Overlap, whole) = overlap.optimizer === whole

"Gives a round up that was dropped while it was open; the overlap ends when the round has."
function let_go(overlap::Overlap)
    round = overlap.round
    if round !== nothing && !ended(round)
        round.open && sotto_overlap_withdraw(overlap.handle, "the overlap was dropped") == SOTTO_OK &&
            (round.open = false)
        return false
    end
    destroy(Overlap, overlap.handle)
    overlap.handle = C_NULL
    return true
end

Base.show(io::IO, overlap::Overlap) = print(io, "Sotto.Overlap(", length(overlap.names),
    " gradients on ", overlap.comm, isopen(overlap) ? ")" : ", closed)")

"""
    begin!(overlap; op = :mean, timeout, priority)

Opens a round. Returns an [`Op`](@ref), which ends when all gradients have become their `:mean` or
`:sum` over ranks, in place, or the step is done; `wait` for it after [`finish!`](@ref). Collective.
Time counts against `timeout` only while no gradient of this rank is missing. If it fails the round's
gradients are undefined; a step reads them only, and has changed nothing. Errors: `:Busy` (a round is
open or in flight); of the round also `:Cancelled` (a rank has withdrawn) and, with a codec or a step,
`:Nonfinite`: the group is healthy then.
"""
function begin!(overlap::Overlap; op = :mean, timeout = nothing, priority = 0)
    op === :mean || op === :sum || invalid("op is $(repr(op)); allowed: :mean, :sum")
    call = call_of(; op = op === :mean ? nothing : op, timeout = timeout, priority = priority)
    # Not the overlap itself: dropped while it is open, it withdraws.
    keep = Any[overlap.arrays, overlap.optimizer]
    one_call(overlap.comm) do
        round = started(out_op -> sotto_overlap_begin(handle_of(overlap), call, out_op), overlap.comm, keep)
        round.flight.open = true
        overlap.round = round.flight
        return round
    end
end

"""
    ready!(overlap, which)
    ready!(overlap, which, arrays)

Gradients are final: the round reads and overwrites them until it has ended, and keeps them alive. A
step reads them only. Any thread.

  - `which`: the number of a gradient, from 1, or its name; or several of them, as a vector, tuple or
    range. The library's error texts count gradients from 0
  - `arrays`: where they are in this round: an array, or as many as in `which`. For a step they have
    the size of the parameters, and may be lazy; else type and length of the gradients'

Errors: `:InvalidArgument` (names the gradient), `:InvalidState` (marked before; no open round), or
what the round has ended with. Nothing changes on error.
"""
function ready!(overlap::Overlap, which, arrays = nothing)
    indices = indices_of(overlap, which)
    memory = arrays === nothing ? Any[place_of(overlap, i) for i in indices] :
        places_in(overlap, indices, is_one(which) ? (arrays,) : arrays)
    buffers = sotto_buffer[buffer_of(x, "gradient \"$(overlap.names[i])\"") for (i, x) in zip(indices, memory)]
    keep_alive(overlap, memory)
    GC.@preserve memory marked(overlap, indices) do handle, numbers, n
        sotto_overlap_ready(handle, numbers, buffers, n, C_NULL)
    end
end

"""
    unused!(overlap, which)

Gradients that this rank does not have in this round count as zero; a mean is still divided by the
number of ranks. Those that lie in the same place in every round become the average as all others.
`which`: as for [`ready!`](@ref). Any thread. Errors: as `ready!`.
"""
unused!(overlap::Overlap, which) = marked(sotto_overlap_unused, overlap, indices_of(overlap, which))

"Marks gradients: f(handle, numbers, n) of the library."
function marked(f, overlap, indices)
    numbers = UInt64[i - 1 for i in indices]
    GC.@preserve overlap check(f(handle_of(overlap), numbers, length(numbers)))
    return nothing
end

"""
    finish!(overlap)

Nothing more comes in this round. Errors: `:InvalidState` (says which gradients are missing, unless
`"unused"` is `"zero"`; the round stays open), or what the round has ended with.
"""
finish!(overlap::Overlap) = ends_round(sotto_overlap_finish, overlap)

"""
    withdraw!(overlap, reason = "no reason given")

This rank gives the open round up, which ends with `:Cancelled` on every rank, when all of them have
finished or withdrawn. The next round is as any. Errors: `:InvalidState` (no open round), or what the
round has ended with.
"""
withdraw!(overlap::Overlap, reason::AbstractString = "no reason given") =
    ends_round(sotto_overlap_withdraw, overlap, reason)

function ends_round(f, overlap, rest...)
    GC.@preserve overlap check(f(handle_of(overlap), rest...))
    overlap.round.open = false
    return nothing
end

is_one(which) = which isa Union{Integer,AbstractString}

"Numbers of gradients from 1."
indices_of(overlap, which) =
    is_one(which) ? [index_of(overlap, which)] : Int[index_of(overlap, each) for each in which]

function index_of(overlap, number::Integer)
    number in eachindex(overlap.names) ||
        invalid("which has gradient $number; allowed: 1 to $(length(overlap.names))")
    return Int(number)
end

function index_of(overlap, name::AbstractString)
    return get(overlap.numbers, name) do
        invalid("which has gradient \"$name\"; allowed: \"$(join(overlap.names, "\", \""))\"")
    end
end

index_of(overlap, x) = invalid("which has a $(typeof(x)); allowed: numbers and names of gradients")

"Where a gradient is in every round."
function place_of(overlap, i)
    x = overlap.arrays[i]
    x === nothing && invalid("gradient \"$(overlap.names[i])\" lies elsewhere in every round; give its array")
    return x
end

"Where gradients are in this round. A step reads them alone, so that copies do."
function places_in(overlap, indices, arrays)
    length(arrays) == length(indices) ||
        invalid("$(counted(length(arrays), "array")) for $(counted(length(indices), "gradient")); give one for each")
    overlap.optimizer === nothing && return Any[x for x in arrays]
    return Any[readable(overlap.optimizer, i, x) for (i, x) in zip(indices, arrays)]
end

"The round holds on to this memory until it has ended."
function keep_alive(overlap, memory)
    round = overlap.round
    keep = round === nothing ? nothing : round.keep  # nothing: there is no round
    keep === nothing || lock(() -> append!(keep, memory), overlap.lock)
    return nothing
end

"Hot figures of an overlap: the fields of `sotto_overlap_info`, `buckets`, `rounds`, `missing` and so on."
info(overlap::Overlap) = filled(out -> sotto_overlap_get_info(handle_of(overlap), out), sotto_overlap_info)

"JSON text. `kind`: `\"all\"`, `\"buckets\"`, `\"order\"`."
report(overlap::Overlap, kind = "all") =
    text_from((place...) -> sotto_overlap_report(handle_of(overlap), kind, place...))

"""
    export_state(overlap, mode = :exact)

The error feedback of a codec as bytes, between rounds. `mode`: `:exact` (same ranks and buckets),
`:mean` (any of them; collective), `:reset` (without it). Errors: `:InvalidState` (no codec; steps,
whose optimizer has it), `:InvalidArgument` (mode), `:Busy`.
"""
export_state(overlap::Overlap, mode = :exact) = exported(sotto_overlap_state_export, overlap, mode)

"""
    import_state!(overlap, bytes, mode = :exact)

Error feedback becomes that of an export in the same mode; `:reset` takes any. Nothing changes on
error. Errors: `:InvalidArgument` (damaged; of other gradients, settings, buckets or ranks),
`:InvalidState` (no codec), `:Busy`.
"""
import_state!(overlap::Overlap, bytes::Vector{UInt8}, mode = :exact) =
    imported(sotto_overlap_state_import, overlap, bytes, mode)
