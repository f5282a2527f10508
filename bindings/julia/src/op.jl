# Operations in flight.

const SLICE_US = 200  # a call of C holds up garbage collection on all threads

"""
    Op

A collective, an optimizer step or a round of an overlap in flight. It may be dropped: the operation
goes on, and its arrays stay alive. Until it has ended they must not be written, and results not be
read.
"""
struct Op
    comm::Comm
    flight::Flight
end

Base.show(io::IO, op::Op) = print(io, "Sotto.Op(", isready(op) ? "ended" : "in flight", ")")

"Starts an operation: start(out_op) calls the library. keep: what it reads and writes."
function started(start, comm::Comm, keep)
    one_call(comm) do
        reap(comm)
        out = Ref{Ptr{sotto_op}}(C_NULL)
        GC.@preserve keep check(start(out))
        flight = Flight(out[], keep, nothing, false)
        push!(comm.flights, flight)
        return Op(comm, flight)
    end
end

"Whether the operation has ended, well or not."
Base.isready(op::Op) = op.flight.handle == C_NULL || one_call(() -> ended(op.flight), op.comm)

"""
    wait(op::Sotto.Op; timeout = Inf)

Waits until the operation has ended; other tasks run meanwhile. `timeout`: seconds; its own deadline
ends the operation anyhow. Errors: the operation's, `:InvalidState` (a round that is open, which
would not end), or `:Timeout` of this call: the operation goes on then.
"""
function Base.wait(op::Op; timeout::Real = Inf)
    limit = time() + timeout
    op.flight.open && !isready(op) &&
        throw(SottoError(:InvalidState, "the round is open, so it would not end: finish! or withdraw! comes first"))
    while !isready(op)
        time() < limit ||
            throw(SottoError(:Timeout, "the operation is still in flight after $timeout s; it goes on"))
        one_call(op.comm) do
            op.flight.handle == C_NULL || sotto_op_wait(op.flight.handle, SLICE_US)
        end
        yield()
    end
    op.flight.error === nothing || throw(op.flight.error)
    return nothing
end
