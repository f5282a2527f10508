# What `bindings/tests/record.c` writes: parameters of a trainer, and its gradients step by step.

struct Recorded
    name::String
    group::Int
    values::Vector{Float32}
end

struct Recording
    tensors::Vector{Recorded}
    steps::Vector{Vector{Vector{Float32}}}  # of every step its gradients
end

"A recording, from the bytes of the file."
function read_recording(path::String)
    bytes, place = read(path), 0
    next(n) = (place += n; view(bytes, place-n+1:place))
    number() = Int(reinterpret(UInt64, next(8))[1])
    floats(n) = collect(reinterpret(Float32, next(4n)))
    tensors = Recorded[]
    for _ in 1:number()
        length, group, count = number(), number(), number()
        push!(tensors, Recorded(String(copy(next(length))), group, floats(count)))
    end
    steps = Vector{Vector{Float32}}[]
    while place < Base.length(bytes)
        push!(steps, [floats(Base.length(tensor.values)) for tensor in tensors])
    end
    return Recording(tensors, steps)
end
