# Outer optimizers: local steps whose changes are averaged in the background.

"""
    Outer(comm, tree, config; shards = nothing)

An outer optimizer over the parameters of a tree. The program makes inner steps of its own on them
and calls [`step!`](@ref) after each; what a period of them has changed is averaged in the background
of the next ones. Collective: all ranks make the same.

  - parameters are `Float32` arrays, equal on all ranks, which is checked: the first anchor. They
    have to stay where they are
  - `config`: JSON text, `{"preset": "co2", "period": 48}`, or a file with `"sotto": {"outer": {...}}`
  - `shards`: a comm of the ranks that hold the shards of this rank's replica, every element on one
    of them, where `comm` is of those that hold the same shard. Norms are of the whole parameters

Errors: `:InvalidArgument` (names the key or the parameter), `:Unsupported`, `:Protocol` (ranks
differ). Threads: one at a time.

    Outer(optimizer)

The outer steps of an [`Optimizer`](@ref) whose configuration has `"sotto": {"outer": {...}}`. Its
`step!` makes them, and its state has theirs: this is for `flush!`, `swap!`, `vote!`, `info` and
`set!` of `"loss"` and `"weight"`. Local. Errors: `:InvalidState` (the configuration has none).
"""
mutable struct Outer <: Owned
    comm::Comm
    handle::Ptr{sotto_outer}
    params::Vector{AbstractArray}
    optimizer::Union{Nothing,Optimizer}  # whose steps these are
    shards::Union{Nothing,Comm}  # kept: its operations use it
    function Outer(comm::Comm, tree, config::AbstractString; shards::Union{Nothing,Comm} = nothing)
        names, _, params = trained(tree)
        out = Ref{Ptr{sotto_outer}}(C_NULL)
        GC.@preserve names params begin
            structs = [made(sotto_param; name = c_text(names[i]),
                           param = buffer_of(params[i], "parameter \"$(names[i])\"")) for i in eachindex(names)]
            one_call(comm) do
                reap(comm)
                n = length(structs)
                check(shards === nothing ?
                      sotto_outer_create(handle_of(comm), config, structs, n, out) :
                      sotto_outer_create_sharded(handle_of(comm), handle_of(shards), config, structs, n, out))
            end
        end
        return own(new(comm, out[], params, nothing, shards))
    end
    function Outer(optimizer::Optimizer)
        out = Ref{Ptr{sotto_outer}}(C_NULL)
        one_call(optimizer.comm) do
            reap(optimizer.comm)
            check(sotto_optim_outer(handle_of(optimizer), out))
        end
        return own(new(optimizer.comm, out[], optimizer.params, optimizer, nothing))
    end
end

destroy(::Type{Outer}, handle) = sotto_outer_destroy(handle)
works_on(outer::Outer, whole) = outer.optimizer === whole

Base.show(io::IO, outer::Outer) = print(io, "Sotto.Outer(", length(outer.params),
    " parameters on ", outer.comm, isopen(outer) ? ")" : ", closed)")

"""
    step!(outer; timeout)

Counts an inner step, which has changed the parameters. Every period it takes what is to be averaged;
where an average is due it moves the anchor and changes the parameters, and waits if the average is
late. Collective: all ranks make as many calls. Returns an [`Op`](@ref): when it has ended the
parameters may be touched again, while an average that was launched goes on. Errors: `:Busy` (a step
in flight), `:InvalidState` (the anchor is swapped in; the outer steps of an optimizer, whose `step!`
makes them); of the step also `:Nonfinite`, where nothing was updated.
"""
step!(outer::Outer; options...) = launched(sotto_outer_step, outer; options...)

"""
    flush!(outer; timeout)

Averages and consumes everything: the parameters become the anchor, equal on all ranks. For the end of
a training; a second call does nothing. Collective. Returns an [`Op`](@ref). Errors: as `step!`.
"""
flush!(outer::Outer; options...) = launched(sotto_outer_flush, outer; options...)

"""
    swap!(outer; timeout)

Puts the anchor into the place of the parameters, for an evaluation; the next call puts them back, bit
for bit. Steps are `:InvalidState` meanwhile. Local. Returns an [`Op`](@ref). Errors: `:Busy`,
`:OutOfMemory`.
"""
swap!(outer::Outer; options...) = launched(sotto_outer_swap, outer; options...)

"""
    vote!(outer, bits)

Bits, 0 to 2^32 - 1, that travel with the next average: `info(outer).votes` has those of all ranks,
or-ed, when it has been consumed, at the same step on all of them. Errors: `:Busy`.
"""
function vote!(outer::Outer, bits::Integer)
    0 <= bits <= typemax(UInt32) || invalid("bits is $bits; allowed: 0 to $(typemax(UInt32))")
    one_call(() -> check(sotto_outer_vote(handle_of(outer), bits)), outer.comm)
    return nothing
end

"""
    set!(outer, name, value)

Sets what belongs to the next steps: `"lr"` (the inner learning rate), `"loss"` (what this rank tells
the others), `"weight"` (1, or 0: this rank's inner steps do not count), `"retune"` (1: a period
"auto" is measured anew). Errors: `:InvalidArgument` (name, value), `:InvalidState` (lr, retune), `:Busy`.
"""
function set!(outer::Outer, name::AbstractString, value::Real)
    one_call(() -> check(sotto_outer_set(handle_of(outer), name, value)), outer.comm)
    return nothing
end

"""
    info(outer)

The fields of `sotto_outer_info`: `step`, `round`, `votes` and so on. `events` has bits
`Sotto.SOTTO_OUTER_LAUNCHED`, `_CONSUMED`, `_HELD`, `_WAITED` and `_MEASURING` of the last step.
Errors: `:Busy` (a step in flight).
"""
info(outer::Outer) = filled(out -> sotto_outer_get_info(handle_of(outer), out), sotto_outer_info)

"""
    export_state(outer, mode = :exact)

This rank's state as bytes, parameters included, after any inner step. Waits for the average under
way, which it does not consume. `mode`: `:exact`, `:common`, and without error feedback `:reset` and
`:mean`. Errors: `:Unsupported` (mode), `:Busy`, `:InvalidState` (the optimizer exports it).
"""
export_state(outer::Outer, mode = :exact) = exported(sotto_outer_state_export, outer, mode)

"""
    import_state!(outer, bytes, mode = :exact)

Replaces this rank's state by an export, parameters included. `:exact`: of the same rank of as many,
goes on bit for bit; other modes: of any rank. Nothing changes on error. Errors: `:InvalidArgument`
(damaged; of other settings, parameters or ranks), `:Busy`.
"""
import_state!(outer::Outer, bytes::Vector{UInt8}, mode = :exact) =
    imported(sotto_outer_state_import, outer, bytes, mode)
