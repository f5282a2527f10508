# Optimizers over arrays or trees of them.

"""
    Optimizer(comm, tree, config)

An optimizer over the parameters of a tree, which steps update in place: a Flux model, Lux's
parameters, a named tuple, an array. Collective: all ranks make the same.

  - parameters are `Float32` arrays; their names are their paths ([`parameters`](@ref))
  - `config`: a DeepSpeed configuration as JSON text:
    `{"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 100}}}`
  - `group`: a function from the name to the parameter group, from 0

Values have to be equal on all ranks, which is checked. The arrays have to stay where they are: a
model that is moved or replaced needs a new optimizer. Errors: `:InvalidArgument` (names the key or
the parameter), `:Unsupported`, `:Protocol` (ranks differ). Threads: one at a time.
"""
mutable struct Optimizer <: Owned
    comm::Comm
    handle::Ptr{sotto_optim}
    names::Vector{String}
    paths::Vector{Vector{Path}}  # all that lead to a parameter
    params::Vector{AbstractArray}
    grads::Vector{AbstractArray}  # where the library reads gradients
    zeros::Dict{Int,AbstractArray}  # in place of gradients that are not there
    function Optimizer(comm::Comm, tree, config::AbstractString; group = name -> 0)
        names, paths, params = trained(tree)
        grads = AbstractArray[zero(x) for x in params]
        out = Ref{Ptr{sotto_optim}}(C_NULL)
        GC.@preserve names params grads begin
            structs = [made(sotto_param; name = c_text(names[i]), group = group(names[i]),
                           param = buffer_of(params[i], "parameter \"$(names[i])\""),
                           grad = buffer_of(grads[i], "its gradient")) for i in eachindex(names)]
            one_call(comm) do
                reap(comm)
                check(sotto_optim_create(handle_of(comm), config, structs, length(structs), out))
            end
        end
        return own(new(comm, out[], names, paths, params, grads, Dict{Int,AbstractArray}()))
    end
end

"Names, paths and arrays of parameters, which have to be of the type that is trained."
function trained(tree)
    found = by_path(tree)
    isempty(found) && invalid("the tree, a $(typeof(tree)), has no array of floating-point numbers")
    paths, params = Vector{Path}[each for (each, _) in found], AbstractArray[x for (_, x) in found]
    names = String[join(first(each), '.') for each in paths]
    for (name, x) in zip(names, params)
        eltype(x) === Float32 || invalid("parameter \"$name\" has elements of type $(eltype(x)); allowed: Float32")
    end
    return names, paths, params
end

destroy(::Type{Optimizer}, handle) = sotto_optim_destroy(handle)

Base.show(io::IO, optimizer::Optimizer) = print(io, "Sotto.Optimizer(", length(optimizer.names),
    " parameters on ", optimizer.comm, isopen(optimizer) ? ")" : ", closed)")

"""
    step!(optimizer, gradients; timeout)

One step: averages the gradients over ranks, clips, updates the parameters. Collective. Returns an
[`Op`](@ref): `wait` for it. `gradients`: a tree like the parameters', as Zygote returns it for a
model or for Lux's parameters, where `nothing` counts as zero, and what tied weights have in several
places is added up; means over this rank's samples. If the operation ends with an error nothing was
updated; `:Nonfinite` leaves the group healthy. Errors: `:Busy` (a step in flight), `:InvalidArgument`
(names a gradient).
"""
step!(optimizer::Optimizer, gradients; options...) =
    (set_grads!(optimizer, gradients); launched(sotto_optim_step, optimizer; options...))

"Adds the gradients of a micro-batch to those that the next step takes the mean of."
accumulate!(optimizer::Optimizer, gradients; options...) =
    (set_grads!(optimizer, gradients); launched(sotto_optim_accumulate, optimizer; options...))

"0/1 Adam between synchronisations: brings the parameters of all ranks together."
synchronize!(optimizer::Optimizer; options...) = launched(sotto_optim_synchronize, optimizer; options...)

"Starts a step: f(handle, call, out_op). It keeps the object alive, and with it the object's arrays."
function launched(f, owned::Owned; timeout = nothing)
    call = call_of(; timeout = timeout)
    started(out_op -> f(handle_of(owned), call, out_op), owned.comm, owned)
end

function set_grads!(optimizer::Optimizer, gradients)
    grads = AbstractArray[gradient_of(optimizer, i, gradients) for i in eachindex(optimizer.names)]
    GC.@preserve grads begin
        buffers = [buffer_of(x, "the gradient of \"$(optimizer.names[i])\"") for (i, x) in enumerate(grads)]
        one_call(optimizer.comm) do
            check(sotto_optim_set_grads(handle_of(optimizer), buffers, length(buffers)))
            optimizer.grads = grads
        end
    end
    return nothing
end

"The gradient of parameter i; of one with several places the sum of what they have, as Zygote returns it."
function gradient_of(optimizer, i, tree)
    there = filter(x -> x !== nothing, Any[at_path(tree, path) for path in optimizer.paths[i]])
    isempty(there) && return get!(() -> zero(optimizer.params[i]), optimizer.zeros, i)
    return reduce(+, AbstractArray[readable(optimizer, i, x) for x in there])
end

"The gradient of parameter i as the library reads it: itself, or a copy if its layout is another."
function readable(optimizer, i, x)
    name, param = optimizer.names[i], optimizer.params[i]
    x isa AbstractArray || invalid("the gradient of \"$name\" is of type $(typeof(x)); an array is needed")
    size(x) == size(param) ||
        invalid("the gradient of \"$name\" has size $(size(x)), the parameter $(size(param))")
    # Zygote returns lazy arrays too, such as transposes and fills.
    return eltype(x) === Float32 && is_dense(x) ? x : convert(Array{Float32}, collect(x))
end

"Sets `\"lr\"`, `\"weight_decay\"` and the like; the C header lists them. `group`: -1: all."
function set!(optimizer::Optimizer, name::AbstractString, value::Real; group::Integer = -1)
    one_call(() -> check(sotto_optim_set(handle_of(optimizer), name, group, value)), optimizer.comm)
    return nothing
end

"Step, stage, learning rate and other figures. Errors: `:Busy` (a step in flight)."
info(optimizer::Optimizer) =
    filled(out -> sotto_optim_get_info(handle_of(optimizer), out), sotto_optim_info)

"JSON text. `kind`: `\"all\"`, `\"config\"`, `\"groups\"`, `\"tensors\"`."
report(optimizer::Optimizer, kind = "all") =
    text_from((place...) -> sotto_optim_report(handle_of(optimizer), kind, place...))

"""
    export_state(optimizer, mode = :configured)

This rank's state as bytes, parameters included. `mode`: `:exact` goes on bit for bit on the same
ranks; `:mean` on any number of them, collective for the 1-bit types; `:reset`, `:common`: see
`sotto_optim_state_export` in the C header.
"""
export_state(optimizer::Optimizer, mode = :configured) = exported(sotto_optim_state_export, optimizer, mode)

"Replaces this rank's state by an export of the same mode. Nothing changes on error."
import_state!(optimizer::Optimizer, bytes::Vector{UInt8}, mode = :configured) =
    imported(sotto_optim_state_import, optimizer, bytes, mode)
