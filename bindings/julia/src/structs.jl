# Structs of the interface: zero is the default of every field.

zero_of(::Type{Cstring}) = Cstring(C_NULL)
zero_of(::Type{Ptr{T}}) where {T} = Ptr{T}(C_NULL)
zero_of(::Type{T}) where {T<:Number} = zero(T)
zero_of(::Type{sotto_buffer}) = made(sotto_buffer)

"A struct with these fields; `struct_size` is set, all others are zero."
function made(::Type{T}; fields...) where {T}
    values = map(fieldnames(T), fieldtypes(T)) do name, kind
        haskey(fields, name) && return convert(kind, fields[name])
        return name === :struct_size ? UInt32(sizeof(T)) : zero_of(kind)
    end
    return T(values...)
end

"A struct that the library fills in, as a named tuple without what is reserved."
function filled(call, ::Type{T}) where {T}
    out = Ref(made(T))
    check(call(out))
    names = filter(name -> !(name in (:struct_size, :reserved)), fieldnames(T))
    return NamedTuple{names}(map(name -> getfield(out[], name), names))
end
