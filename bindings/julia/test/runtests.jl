# Sotto.jl on one rank: loading, arrays, trees, optimizers, what is refused. SOTTO_LIBRARY names the
# library; `test/ranks.jl` is for several.

using Sotto, Test

struct Layer
    weight::Matrix{Float32}
    bias::Vector{Float32}
    activation::Function
end

mutable struct Model
    layers::Tuple
    steps::Int
    again::Any
end

"The error of a call."
function failed(call)
    try
        call()
    catch error
        error isa SottoError_ || rethrow()
        return error
    end
    return nothing
end
const SottoError_ = Sotto.SottoError

sgd(lr = 1.0) = """{"optimizer": {"type": "SGD", "params": {"lr": $lr}}}"""

"A new process with an environment: what it printed, its errors too."
function julia(program; environment...)
    words = `$(Base.julia_cmd()) --startup-file=no -e $program`
    out = IOBuffer()
    run(pipeline(ignorestatus(setenv(words, merge(Dict(ENV), Dict(string(k) => v for (k, v) in environment)))),
        stdout = out, stderr = out))
    return String(take!(out))
end

@testset "library" begin
    @test occursin(r"^0\.\d+\.\d+", Sotto.text_of(Sotto.sotto_version_string()))
    @test all(name -> isdefined(Sotto, name), Sotto.C_FUNCTIONS)
    @test length(Sotto.SYMBOLS) == length(Sotto.C_FUNCTIONS) > 90
    said = julia("using Sotto; Sotto.init(size = 1)"; SOTTO_LIBRARY = "/nonexistent.so")
    @test occursin("SottoError(LibraryLoad): /nonexistent.so cannot be loaded (SOTTO_LIBRARY is set)", said)
    other = julia("using Sotto; Sotto.init(size = 1)"; SOTTO_LIBRARY = "libm.so.6")
    @test occursin("libm.so.6 has no function sotto_abi_version", other)
end

@testset "arrays" begin
    x = rand(Float32, 4, 6)
    buffer = Sotto.buffer_of(x, "x")
    @test buffer.data == pointer(x) && buffer.count == 24 && buffer.dtype == Sotto.SOTTO_FLOAT32
    @test Sotto.buffer_of(view(x, :, 2:3), "x").count == 8
    @test Sotto.buffer_of(reshape(x, 24), "x").data == pointer(x)
    @test Sotto.buffer_of(Float64[], "x").data == C_NULL
    for (T, dtype) in ((Int8, Sotto.SOTTO_INT8), (UInt64, Sotto.SOTTO_UINT64), (Float16, Sotto.SOTTO_FLOAT16))
        @test Sotto.buffer_of(zeros(T, 3), "x").dtype == dtype
    end
    error = failed(() -> Sotto.buffer_of(view(x, 1:2, :), "x[2]"))
    @test error.status == :InvalidArgument && occursin("x[2], a SubArray", error.text)
    @test failed(() -> Sotto.buffer_of(transpose(x), "x")).status == :InvalidArgument
    @test failed(() -> Sotto.buffer_of(zeros(ComplexF32, 2), "x")).status == :Unsupported
    @test occursin("x is a number", failed(() -> Sotto.arrays_of(1.0, "x")).text)
    @test occursin("x[2] is of type String", failed(() -> Sotto.arrays_of(([1.0], "b"), "x")).text)
end

@testset "trees" begin
    shared = ones(Float32, 2)
    model = Model((Layer(ones(3, 2), zeros(3), tanh), Layer(ones(1, 3), shared, identity)), 7, nothing)
    model.again = (model, shared)
    @test first.(Sotto.parameters(model)) ==
        ["layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
    lux = (dense = (weight = ones(Float32, 2, 2), bias = Float32[1]), empty = NamedTuple())
    @test first.(Sotto.parameters(lux)) == ["dense.weight", "dense.bias"]
    @test Sotto.parameters(lux)[1][2] === lux.dense.weight
    @test first.(Sotto.parameters(Dict("b.c" => shared, "a" => [ones(2), ones(3)]))) == ["a.1", "a.2", "b.c"]
    @test first.(Sotto.parameters(ones(3))) == [""]
    @test isempty(Sotto.parameters((1, "text", [1, 2])))
end

@testset "one rank" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    @test (Sotto.rank(comm), length(comm), isopen(comm)) == (0, 1, true)
    x, y = [1.0, 2.0], zeros(2)
    @test wait(Sotto.all_reduce!(comm, x, y)) === nothing
    @test y == x
    @test occursin("op is :median; allowed: :bit_or", failed(() -> Sotto.all_reduce!(comm, x; op = :median)).text)
    @test occursin("x has 1 arrays and out has 2", failed(() -> Sotto.all_reduce!(comm, x, (y, y))).text)
    @test failed(() -> Sotto.broadcast!(comm, x, 3)).status == :InvalidArgument
    @test occursin("operations_in_flight", Sotto.report(comm, "waiting"))
    @test Sotto.counters(comm).payload_bytes_sent == 0
    @test failed(() -> Sotto.Codec(comm, """{"type": "two bits"}""", x)).status == :InvalidArgument
    close(comm)
    close(comm)
    @test isempty(Sotto.COMMS)
    @test failed(() -> Sotto.barrier(comm)).text == "this comm is closed"
    @test occursin("rank is 1 and size is nothing", failed(() -> Sotto.init(rank = 1)).text)
end

@testset "optimizer" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    params = (w = ones(Float32, 2, 2), inner = (b = ones(Float32, 3),))
    optimizer = Sotto.Optimizer(comm, params, sgd())
    wait(Sotto.step!(optimizer, (w = ones(Float32, 2, 2), inner = nothing)))
    @test params.w == zeros(2, 2) && params.inner.b == ones(3)
    wait(Sotto.step!(optimizer, (w = transpose(Float64[1 2; 3 4]), inner = (b = ones(Float32, 3),))))
    @test params.w == -[1 3; 2 4] && params.inner.b == zeros(3)
    @test Sotto.info(optimizer).step == 2
    @test occursin("\"inner.b\"", Sotto.report(optimizer, "tensors"))
    state, saved = Sotto.export_state(optimizer, :exact), copy(params.w)
    Sotto.set!(optimizer, "lr", 0.5)
    wait(Sotto.step!(optimizer, deepcopy(params)))
    @test params.w == 0.5 .* saved
    Sotto.import_state!(optimizer, state, :exact)
    @test params.w == saved
    @test failed(() -> Sotto.import_state!(optimizer, state[1:10], :exact)).status == :InvalidArgument
    @test occursin("mode is :all; allowed: :common", failed(() -> Sotto.export_state(optimizer, :all)).text)
    wrong = failed(() -> Sotto.step!(optimizer, (w = ones(Float32, 4), inner = nothing)))
    @test occursin("the gradient of \"w\" has size (4,), the parameter (2, 2)", wrong.text)
    bad = Sotto.step!(optimizer, (w = fill(NaN32, 2, 2), inner = nothing))
    @test failed(() -> wait(bad)).status == :Nonfinite
    @test params.w == saved
    @test occursin("\"w\" has elements of type Float64", failed(() -> Sotto.Optimizer(comm, (w = ones(2),), sgd())).text)
    @test occursin("optimizer.typ: unknown key", failed(() -> Sotto.Optimizer(comm, params, """{"optimizer": {"typ": "SGD"}}""")).text)
    close(optimizer)
    @test failed(() -> Sotto.info(optimizer)).text == "this Optimizer is closed"
    close(comm)
end

@testset "what is dropped ends with a later call" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    drop_some() = for _ in 1:20
        Sotto.Optimizer(comm, (w = ones(Float32, 100),), sgd())
        Sotto.Codec(comm, """{"type": "onebit"}""", zeros(Float32, 64))
        Sotto.all_reduce!(comm, ones(1000))
    end
    drop_some()
    GC.gc()
    GC.gc()
    @test !isempty(comm.dropped)
    for _ in 1:100
        wait(Sotto.barrier(comm))
    end
    @test isempty(comm.dropped) && length(comm.flights) <= 1
    @test count(reference -> reference.value !== nothing, comm.owned) <= 2
    kept = Sotto.Optimizer(comm, (w = ones(Float32, 4),), sgd())
    close(comm)
    @test !isopen(kept)
end
