# Groups of ranks.

"An operation that has been started. `keep`: what it reads and writes."
mutable struct Flight
    handle::Ptr{sotto_op}  # C_NULL: it has ended
    keep::Any
    error::Union{Nothing,SottoError}
    open::Bool  # a round that is not finished: it would not end
end

"""
    Comm

An ordered set of ranks: what [`init`](@ref) makes. `close` leaves it. It stays alive until then,
and with it all that operations in flight work on. Threads: any.
"""
mutable struct Comm
    context::Ptr{sotto_context}
    handle::Ptr{sotto_comm}  # C_NULL: closed
    rank::Int
    size::Int
    lock::ReentrantLock
    flights::Vector{Flight}
    owned::Vector{WeakRef}  # codecs, optimizers and so on, which end before the comm does
    dropped::Vector{Function}  # what finalizers leave to the next call; each says whether it is done
    gate::Threads.SpinLock  # of dropped; finalizers never wait for it
end

const COMMS = Comm[]
const COMMS_LOCK = ReentrantLock()

microseconds(::Nothing) = Int64(0)
microseconds(seconds::Real) = isinf(seconds) ? Int64(-1) : max(Int64(1), round(Int64, 1e6 * seconds))

"""
    Sotto.init(; rank, size, rendezvous, transport, timeout, cpu_threads, max_ops)

Joins the other ranks; every rank calls it. Without arguments rank, size and rendezvous are the
launcher's: sotto-run, torchrun, Open MPI, MPICH or Slurm.

  - `rank` from 0, `size`: both or neither. `size = 1` makes a group of this process alone
  - `rendezvous`: `"tcp://HOST:PORT"`, an address of rank 0; `nothing`: SOTTO_RENDEZVOUS or the
    launcher's
  - `timeout`: seconds, of the set-up and of operations; `Inf`: none; `nothing`: SOTTO_TIMEOUT_US,
    300 s
  - `cpu_threads`: for kernels; 0: SOTTO_CPU_THREADS, else cores per rank. `max_ops`: 0: 1024

Errors: `SottoError` with status `:InvalidArgument`, `:Timeout` (names who is missing),
`:Transport`, `:Protocol`, `:LibraryLoad`. Blocks, and with it garbage collection on all threads.
"""
function init(; rank = nothing, size = nothing, rendezvous = nothing, transport = nothing,
              timeout = nothing, cpu_threads = 0, max_ops = 0)
    (rank === nothing) == (size === nothing) || size == 1 ||
        invalid("rank is $rank and size is $size; give both or neither")
    rendezvous === nothing || size === nothing || size == 1 ||
        return with_rendezvous(() -> init(; rank = rank, size = size, transport = transport,
            timeout = timeout, cpu_threads = cpu_threads, max_ops = max_ops), rendezvous)
    rendezvous === nothing || size == 1 || invalid("rendezvous is given without rank and size")
    context = Ref{Ptr{sotto_context}}(C_NULL)
    settings = Ref(made(sotto_context_config; cpu_threads = cpu_threads, max_ops = max_ops))
    check(sotto_context_create_v(SOTTO_ABI_VERSION, settings, context))
    name = transport === nothing ? nothing : String(transport)
    try
        out = Ref{Ptr{sotto_comm}}(C_NULL)
        GC.@preserve name begin
            config = Ref(made(sotto_comm_config; rank = something(rank, 0), size = something(size, 0),
                transport = c_text(name), timeout_us = microseconds(timeout)))
            check(sotto_comm_create(context[], config, out))
        end
        return comm_of(context[], out[])
    catch
        sotto_context_destroy(context[])
        rethrow()
    end
end

c_text(::Nothing) = Cstring(C_NULL)
c_text(text::String) = Base.unsafe_convert(Cstring, text)

with_rendezvous(body, place) = withenv(body, "SOTTO_RENDEZVOUS" => place)

function comm_of(context, handle)
    number = Ref{Int32}(0)
    check(sotto_comm_rank(handle, number))
    rank = Int(number[])
    check(sotto_comm_size(handle, number))
    comm = Comm(context, handle, rank, Int(number[]), ReentrantLock(), Flight[], WeakRef[],
        Function[], Threads.SpinLock())
    lock(() -> push!(COMMS, comm), COMMS_LOCK)
    return comm
end

Base.show(io::IO, comm::Comm) = print(io, "Sotto.Comm(rank ", comm.rank, " of ", comm.size,
    comm.handle == C_NULL ? ", closed)" : ")")

"The number of this rank, from 0."
rank(comm::Comm) = comm.rank

"The number of ranks."
Base.length(comm::Comm) = comm.size

Base.isopen(comm::Comm) = comm.handle != C_NULL

function handle_of(comm::Comm)
    isopen(comm) || throw(SottoError(:InvalidState, "this comm is closed"))
    return comm.handle
end

"""
The only call on a comm. An interrupt (Ctrl-C) that comes meanwhile is thrown behind it: it would lose
what the call has started, and with it the memory that the library works on.
"""
one_call(call, comm::Comm) = lock(() -> disable_sigint(call), comm.lock)

"What finalizers have left, and operations that have ended. With the lock of the comm."
function reap(comm::Comm)
    lock(comm.gate)
    left = splice!(comm.dropped, 1:length(comm.dropped))
    unlock(comm.gate)
    filter!(end_it -> !end_it(), left)
    lock(comm.gate)
    append!(comm.dropped, left)
    unlock(comm.gate)
    filter!(flight -> !ended(flight), comm.flights)
    filter!(comm.owned) do reference
        object = reference.value
        return object !== nothing && isopen(object)
    end
    return nothing
end

"Whether an operation has ended; takes its outcome then, and lets go of its memory."
function ended(flight::Flight)
    flight.handle == C_NULL && return true
    status = sotto_op_test(flight.handle)
    status == SOTTO_IN_PROGRESS && return false
    if status < 0
        text = Ref(Cstring(C_NULL))
        sotto_op_error(flight.handle, text)
        flight.error = status_error(status, text_of(text[]))
    end
    sotto_op_release(flight.handle)
    flight.handle, flight.keep = C_NULL, nothing
    return true
end

"""
Leaves an object of a comm to its next call: finalizers must not wait. `let_go()` says whether it is
done, and is called again if not. Not for users.
"""
function drop(comm::Comm, object, let_go::Function)
    # The collector may have stopped a thread that holds it: another round asks again.
    if !trylock(comm.gate)
        finalizer(object -> drop(comm, object, let_go), object)
        return nothing
    end
    push!(comm.dropped, let_go)
    unlock(comm.gate)
    return nothing
end

"""
    split(comm, color; key = 0)

Ranks with the same color form a new comm, ordered by key, then by rank. Collective. `color`: from
0; `nothing`: this rank gets no comm, and `nothing` is returned. Close it before its parent.
"""
function Base.split(comm::Comm, color::Union{Integer,Nothing}; key::Integer = 0)
    color === nothing || color >= 0 || invalid("color is $color; allowed: from 0, or nothing")
    out = Ref{Ptr{sotto_comm}}(C_NULL)
    number = color === nothing ? -1 : color
    one_call(() -> check(sotto_comm_split(handle_of(comm), number, key, out)), comm)
    return out[] == C_NULL ? nothing : comm_of(Ptr{sotto_context}(C_NULL), out[])
end

"Fails the comm, and all that share its connections, on every rank."
abort(comm::Comm, reason = "no reason given") = (check(sotto_comm_abort(handle_of(comm), reason)); nothing)

"Bytes and messages of this comm, without its splits."
counters(comm::Comm) =
    filled(out -> sotto_comm_get_counters(handle_of(comm), out), sotto_comm_counters)

"JSON text. `kind`: `\"all\"`, `\"counters\"`, `\"routes\"`, `\"waiting\"`."
report(comm::Comm, kind = "all") = text_from((place...) -> sotto_comm_report(handle_of(comm), kind, place...))

"""
    close(comm)

Ends codecs, optimizers, outer optimizers and overlaps of the comm, waits for operations in flight,
at most the comm's timeout, and leaves the group. Not collective. A second call does nothing. Errors:
the first met.
"""
function Base.close(comm::Comm)
    isopen(comm) || return nothing
    status, text = Int32(SOTTO_OK), ""
    one_call(comm) do
        objects = [reference.value for reference in comm.owned]
        foreach(object -> object === nothing || close(object), objects)
        reap(comm)
        status = sotto_comm_destroy(comm.handle)
        text = text_of(sotto_last_error())
        status == SOTTO_E_INVALID_STATE && return
        comm.handle = C_NULL
        reap(comm)
        comm.context == C_NULL || sotto_context_destroy(comm.context)
    end
    isopen(comm) || lock(() -> filter!(other -> other !== comm, COMMS), COMMS_LOCK)
    status < 0 && throw(status_error(status, text))
    return nothing
end

"At the end of the process: comms are closed, those that were split off first."
function close_all()
    for comm in reverse(copy(COMMS))
        isempty(comm.flights) || one_call(() -> reap(comm), comm)
        isempty(comm.flights) || continue  # what is in flight ends with the process
        try
            close(comm)
        catch error
            error isa SottoError || rethrow()
        end
    end
end
