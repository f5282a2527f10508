# How all-reduces encode data on the wire, and other objects that live on a comm.

"What codecs, optimizers, outer optimizers and overlaps have in common: `comm` and `handle`."
abstract type Owned end

function handle_of(owned::Owned)
    owned.handle == C_NULL && throw(SottoError(:InvalidState, "this $(nameof(typeof(owned))) is closed"))
    return owned.handle
end

Base.isopen(owned::Owned) = owned.handle != C_NULL

"To be called by constructors: the comm ends it, or the collector leaves it to the comm."
function own(owned::Owned)
    one_call(() -> push!(owned.comm.owned, WeakRef(owned)), owned.comm)
    finalizer(owned) do owned
        owned.handle == C_NULL || drop(owned.comm, owned, () -> let_go(owned))
    end
    return owned
end

"Ends what was dropped, with its memory still there. Whether that is done. With the lock of the comm."
function let_go(owned::Owned)
    destroy(typeof(owned), owned.handle)
    owned.handle = C_NULL
    return true
end

"Whether it works on another object, which then ends after it."
works_on(part, whole) = false

"""
    close(codec)

Gives a codec, an optimizer, an outer optimizer or an overlap back to the library, behind a step in
flight; a second call does nothing. An optimizer's overlaps and outer steps are closed before it, an
overlap withdraws from an open round. Waits, with an outer optimizer for averages under way, with an
overlap for the round, at most their deadlines.
"""
function Base.close(owned::Owned)
    one_call(owned.comm) do
        owned.handle == C_NULL && return nothing
        reap(owned.comm)
        parts = [reference.value for reference in owned.comm.owned]
        foreach(close, filter(part -> works_on(part, owned), parts))
        isopen(owned.comm) && check(destroy(typeof(owned), owned.handle))
        owned.handle = C_NULL
        return nothing
    end
end

"Calls an export function: state(handle, mode, buffer, capacity, out_length)."
function exported(state, owned::Owned, mode)
    number, need = state_mode(mode), Ref{UInt64}(0)
    one_call(owned.comm) do
        check(state(handle_of(owned), number, C_NULL, 0, need))
        bytes = Vector{UInt8}(undef, need[])
        check(state(handle_of(owned), number, bytes, length(bytes), need))
        return resize!(bytes, need[])
    end
end

"Calls an import function: state(handle, mode, buffer, length)."
function imported(state, owned::Owned, bytes, mode)
    number = state_mode(mode)
    one_call(() -> check(state(handle_of(owned), number, bytes, length(bytes))), owned.comm)
    return nothing
end

const STATE_MODES = Dict(
    :configured => SOTTO_STATE_CONFIGURED, :exact => SOTTO_STATE_EXACT, :reset => SOTTO_STATE_RESET,
    :mean => SOTTO_STATE_MEAN, :common => SOTTO_STATE_COMMON,
)

state_mode(mode) = get(STATE_MODES, mode) do
    invalid("mode is $(repr(mode)); allowed: $(join(map(repr, sort!(collect(keys(STATE_MODES)))), ", "))")
end

"""
    Codec(comm, json, like)

How [`all_reduce!`](@ref) of arrays like these sends data: `{"type": "onebit"}`, `"int8"` and so on,
with what encoding has left over. Used by one thread at a time. Errors: `:InvalidArgument` (names
the key), `:Unsupported`.
"""
mutable struct Codec <: Owned
    comm::Comm
    handle::Ptr{sotto_codec}
    function Codec(comm::Comm, json::AbstractString, like)
        arrays, buffers = arrays_of(like, "like")
        out = Ref{Ptr{sotto_codec}}(C_NULL)
        one_call(comm) do
            reap(comm)
            GC.@preserve arrays check(sotto_codec_create(handle_of(comm), json, buffers, length(buffers), out))
        end
        return own(new(comm, out[]))
    end
end

destroy(::Type{Codec}, handle) = sotto_codec_destroy(handle)

"What encoding has left over, as bytes. `mode`: `:exact`, `:mean`, `:reset`."
export_state(codec::Codec, mode = :exact) = exported(sotto_codec_state_export, codec, mode)

"Replaces it by an export of the same mode."
import_state!(codec::Codec, bytes::Vector{UInt8}, mode = :exact) =
    imported(sotto_codec_state_import, codec, bytes, mode)
