# Errors, with the library's text.

const STATUS_NAMES = Dict{Int32,Symbol}(
    SOTTO_E_INVALID_ARGUMENT => :InvalidArgument,
    SOTTO_E_INVALID_STATE => :InvalidState,
    SOTTO_E_UNSUPPORTED => :Unsupported,
    SOTTO_E_OUT_OF_MEMORY => :OutOfMemory,
    SOTTO_E_BUSY => :Busy,
    SOTTO_E_TIMEOUT => :Timeout,
    SOTTO_E_PEER_LOST => :PeerLost,
    SOTTO_E_ABORTED => :Aborted,
    SOTTO_E_PROTOCOL => :Protocol,
    SOTTO_E_TRANSPORT => :Transport,
    SOTTO_E_DEVICE => :Device,
    SOTTO_E_INTERNAL => :Internal,
    SOTTO_E_NONFINITE => :Nonfinite,
    SOTTO_E_CANCELLED => :Cancelled,
)

"""
    SottoError(status::Symbol, text)

What a call or an operation has failed with. `status`: `:InvalidArgument`, `:Timeout`, `:PeerLost`
and so on, as the constants `SOTTO_E_*` are called; `:LibraryLoad`: no library.
"""
struct SottoError <: Exception
    status::Symbol
    text::String
end

Base.showerror(io::IO, error::SottoError) = print(io, "SottoError(", error.status, "): ", error.text)

invalid(text) = throw(SottoError(:InvalidArgument, text))

text_of(text::Cstring) = text == C_NULL ? "" : unsafe_string(text)

status_error(status::Integer, text) =
    SottoError(get(STATUS_NAMES, Int32(status), Symbol("Status", status)), text)

"Throws what a call has returned, if that is an error."
function check(status::Integer)
    status < 0 && throw(status_error(status, text_of(sotto_last_error())))
    return status
end

"The text of a report function: call(buffer, capacity, out_length) writes it."
function text_from(call)
    length_out = Ref{UInt64}(0)
    check(call(Ptr{UInt8}(C_NULL), 0, length_out))
    while true
        bytes = Vector{UInt8}(undef, length_out[] + 1)
        check(call(bytes, length(bytes), length_out))
        # A report that has grown meanwhile is asked for again.
        length_out[] < length(bytes) && return String(bytes[1:length_out[]])
    end
end
