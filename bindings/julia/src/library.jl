# The shared library: found and checked on first use, its symbols local.

const LIBRARY = Ref{Ptr{Cvoid}}(C_NULL)
const SYMBOLS = Dict{Symbol,Ptr{Cvoid}}()
const C_FUNCTIONS = Symbol[]  # names of all that abi.jl declares
const LOAD_LOCK = ReentrantLock()

"""
    @c_function name(argument::Type, ...)::Result

Declares a function of the library: a Julia function of the same name and arguments.
"""
macro c_function(signature)
    call, result = signature.args
    name, arguments = call.args[1], call.args[2:end]
    names = [argument.args[1] for argument in arguments]
    address = Expr(:$, :(symbol($(QuoteNode(name)))))
    typed = Expr(:(::), Expr(:call, address, arguments...), result)
    body = Expr(:macrocall, Symbol("@ccall"), __source__, typed)
    return esc(quote
        push!(C_FUNCTIONS, $(QuoteNode(name)))
        $name($(names...)) = $body
    end)
end

"The address of a function. Errors: SottoError (the library cannot be loaded)."
function symbol(name::Symbol)
    LIBRARY[] == C_NULL && load()
    return SYMBOLS[name]
end

"""
    library_path()

The file that is loaded, or will be: what SOTTO_LIBRARY names, else the system's.
"""
library_path() = is_named() ? ENV["SOTTO_LIBRARY"] : "libsotto.so.$SOTTO_ABI_MAJOR"

is_named() = !isempty(get(ENV, "SOTTO_LIBRARY", ""))

function load()
    lock(LOAD_LOCK) do
        LIBRARY[] == C_NULL || return
        path = library_path()
        handle = try
            dlopen(path, RTLD_NOW | RTLD_LOCAL)
        catch error
            why = is_named() ? "SOTTO_LIBRARY is set" : "SOTTO_LIBRARY is not set"
            throw(SottoError(:LibraryLoad, "$path cannot be loaded ($why): $(sprint(showerror, error))"))
        end
        version = dlsym(handle, :sotto_abi_version; throw_error = false)
        version === nothing && refuse(handle, path, "has no function sotto_abi_version")
        found = ccall(version, UInt32, ())
        major, minor = Int(found >> 16), Int(found & 0xffff)
        if major != SOTTO_ABI_MAJOR || minor < SOTTO_ABI_MINOR
            refuse(handle, path, "has ABI $major.$minor, this package was written for " *
                "$SOTTO_ABI_MAJOR.$SOTTO_ABI_MINOR; the major version has to be equal and the " *
                "library's minor version not lower")
        end
        for name in C_FUNCTIONS
            address = dlsym(handle, name; throw_error = false)
            address === nothing && refuse(handle, path, "has no function $name")
            SYMBOLS[name] = address
        end
        LIBRARY[] = handle  # last: other threads look at it without the lock
    end
    return nothing
end

function refuse(handle, path, text)
    empty!(SYMBOLS)
    dlclose(handle)
    throw(SottoError(:LibraryLoad, "$path $text"))
end
