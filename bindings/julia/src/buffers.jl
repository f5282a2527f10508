# Arrays as `sotto_buffer`, without a copy.

"""
    Sotto.dtype(T)

The library's number of an element type. A package with a type of its own, such as
`BFloat16s.BFloat16`, adds a method that returns `Sotto.SOTTO_BFLOAT16`.
"""
dtype(::Type{T}) where {T} = throw(SottoError(:Unsupported, "elements of type $T; allowed: Int8 to " *
    "Int64, UInt8 to UInt64, Float16, Float32, Float64, and types with a method of Sotto.dtype"))
dtype(::Type{Int8}) = SOTTO_INT8
dtype(::Type{Int16}) = SOTTO_INT16
dtype(::Type{Int32}) = SOTTO_INT32
dtype(::Type{Int64}) = SOTTO_INT64
dtype(::Type{UInt8}) = SOTTO_UINT8
dtype(::Type{UInt16}) = SOTTO_UINT16
dtype(::Type{UInt32}) = SOTTO_UINT32
dtype(::Type{UInt64}) = SOTTO_UINT64
dtype(::Type{Float16}) = SOTTO_FLOAT16
dtype(::Type{Float32}) = SOTTO_FLOAT32
dtype(::Type{Float64}) = SOTTO_FLOAT64

"Where an array lies, if its elements follow each other. The caller keeps it alive."
function buffer_of(x::AbstractArray{T}, what) where {T}
    number = dtype(T)
    is_dense(x) || invalid("$what, a $(typeof(x)), is not contiguous in memory; collect() makes a copy that is")
    data = isempty(x) ? C_NULL : Ptr{Cvoid}(pointer(x))
    return made(sotto_buffer; data = data, count = length(x), dtype = number,
        device_type = SOTTO_DEVICE_CPU)
end
buffer_of(x, what) = invalid("$what is of type $(typeof(x)); allowed: arrays, and vectors and tuples of arrays")

"In host memory, first index fastest, without gaps."
is_dense(x::Array) = true
is_dense(x::Base.ReshapedArray) = is_dense(parent(x))
function is_dense(x::SubArray)
    x isa StridedArray && is_dense(parent(x)) || return false  # of other indices, as vectors, strides are errors
    steps = cumprod((1, size(x)...))
    return all(i -> size(x, i) <= 1 || stride(x, i) == steps[i], 1:ndims(x))
end
is_dense(x) = false

"One array, or several that are one operation."
arrays_of(x::AbstractArray{<:Number}, what) = (x,), [buffer_of(x, what)]
function arrays_of(x, what)
    arrays = collect(x)  # once: a generator makes others when it is asked again
    return arrays, sotto_buffer[buffer_of(each, "$what[$i]") for (i, each) in enumerate(arrays)]
end
arrays_of(x::Number, what) = invalid("$what is a number; allowed: arrays, and vectors and tuples of arrays")
