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

"The error of loading a library of this C source."
function failed_with(cc, source)
    mktempdir() do folder
        write(joinpath(folder, "stub.c"), source)
        library = joinpath(folder, "libstub.so")
        run(`$cc -shared -fPIC -o $library $(joinpath(folder, "stub.c"))`)
        return failed(() -> withenv(Sotto.load, "SOTTO_LIBRARY" => library))
    end
end

version_of(major, minor) = "unsigned sotto_abi_version(void) { return $(major)u << 16 | $minor; }\n"

# Before any other: a process loads one library.
@testset "other libraries are refused" begin
    cc = Sys.which("cc")
    cc === nothing && @info "left out: there is no cc"
    for (major, minor) in (cc === nothing ? () : ((1, 2), (0, 1), (0, 0)))
        error = failed_with(cc, version_of(major, minor))
        @test error.status == :LibraryLoad
        @test occursin("libstub.so has ABI $major.$minor, this package was written for 0.2", error.text)
    end
    functions = [name for name in Sotto.C_FUNCTIONS if !(name in (:sotto_abi_version, :sotto_outer_vote))]
    stubs = join("int $name(void) { return 0; }\n" for name in functions)
    error = cc === nothing ? nothing : failed_with(cc, version_of(0, 3) * stubs)
    @test error === nothing || occursin("libstub.so has no function sotto_outer_vote", error.text)
    @test isempty(Sotto.SYMBOLS) && Sotto.LIBRARY[] == C_NULL
end

@testset "library" begin
    @test occursin(r"^0\.\d+\.\d+", Sotto.text_of(Sotto.sotto_version_string()))
    @test all(name -> isdefined(Sotto, name), Sotto.C_FUNCTIONS)
    @test length(Sotto.SYMBOLS) == length(Sotto.C_FUNCTIONS) > 90
    said = julia("using Sotto; Sotto.init(size = 1)"; SOTTO_LIBRARY = "/nonexistent.so")
    @test occursin("SottoError(LibraryLoad): /nonexistent.so cannot be loaded (SOTTO_LIBRARY is set)", said)
    other = julia("using Sotto; Sotto.init(size = 1)"; SOTTO_LIBRARY = "libm.so.6")
    @test occursin("libm.so.6 has no function sotto_abi_version", other)
    none = julia("using Sotto; print(Sotto.library_path())"; SOTTO_LIBRARY = "")
    @test none == "libsotto.so.0"
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
    for at in ([1, 2], [1])
        @test failed(() -> Sotto.buffer_of(view(x, at), "x")).status == :InvalidArgument
    end
    @test failed(() -> Sotto.buffer_of(zeros(ComplexF32, 2), "x")).status == :Unsupported
    arrays, buffers = Sotto.arrays_of((copy(each) for each in (x, x)), "x")
    @test [buffer.data for buffer in buffers] == map(pointer, arrays)
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

# As Flux's layers are: a chain of structs, some without a bias, one mutable with arrays that are not trained.
struct Chain
    layers::Tuple
end

mutable struct Norm
    β::Vector{Float32}
    γ::Vector{Float32}
    μ::Vector{Float32}
    active::Union{Bool,Nothing}
end
Sotto.children(layer::Norm) = pairs((β = layer.β, γ = layer.γ))

struct Dense
    weight::Matrix{Float32}
    bias::Any
    σ::Function
end

@testset "gradients as Zygote makes them" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    norm, dense = Norm(zeros(2), ones(2), fill(7, 2), nothing), Dense(ones(2, 2), false, tanh)
    model = Chain((dense, norm, Chain((dense, identity))))
    optimizer = Sotto.Optimizer(comm, model, sgd())
    @test optimizer.names == ["layers.1.weight", "layers.2.β", "layers.2.γ"]
    of_dense(x) = (weight = fill(Float32(x), 2, 2), bias = nothing, σ = nothing)
    of_norm = Base.RefValue{Any}((β = Float32[1, 2], γ = nothing, μ = nothing, active = nothing))
    wait(Sotto.step!(optimizer, (layers = (of_dense(1), of_norm, (layers = (of_dense(2), nothing),)),)))
    @test dense.weight == fill(-2, 2, 2)  # shared: 1 - (1 + 2)
    @test norm.β == [-1, -2] && norm.γ == [1, 1] && norm.μ == [7, 7]
    wait(Sotto.step!(optimizer, deepcopy(model)))  # a tree of the same types
    @test dense.weight == fill(2, 2, 2) && norm.β == [0, 0] && norm.γ == [0, 0]
    close(optimizer)

    # As Lux's are: named tuples of named tuples, empty ones for layers without parameters.
    params = (layer_1 = (weight = ones(Float32, 2, 3), bias = ones(Float32, 2)), layer_2 = NamedTuple(),
        layer_3 = (cell = (weight_i = ones(Float32, 2),), tied = Ref(ones(Float32, 2))))
    optimizer = Sotto.Optimizer(comm, params, sgd())
    @test optimizer.names == ["layer_1.weight", "layer_1.bias", "layer_3.cell.weight_i", "layer_3.tied.x"]
    tied = Base.RefValue{Any}((x = Float32[3, 4],))
    wait(Sotto.step!(optimizer, (layer_1 = (weight = fill(2.0, 2, 3), bias = nothing), layer_2 = nothing,
        layer_3 = (cell = (weight_i = Float32[5, 6],), tied = tied))))
    @test all(==(-1), params.layer_1.weight) && all(==(1), params.layer_1.bias)
    @test params.layer_3.cell.weight_i == [-4, -5] && params.layer_3.tied[] == [-2, -3]
    before = deepcopy(params)
    gradients = deepcopy(params)
    for (wrong, text) in (
            ((gradients,), "the gradients, a Tuple{"),  # as gradient() returns it, without [1]
            ((layer_1 = gradients.layer_1, layer_3 = gradients.layer_3, layer_2 = ()), ""),
            ((layer_1 = (weigth = gradients.layer_1.weight, bias = nothing), layer_2 = nothing, layer_3 = nothing),
                "the gradient at \"layer_1\", a NamedTuple"),
            ((layer_1 = nothing, layer_2 = nothing, layer_3 = (cell = Float32[5, 6], tied = nothing)),
                "the gradient at \"layer_3.cell\", a Array{Float32,1}, has no \"weight_i\""))
        error = failed(() -> wait(Sotto.step!(optimizer, wrong)))
        isempty(text) ? @test(error === nothing) : @test(error.status == :InvalidArgument && occursin(text, error.text))
        isempty(text) && Sotto.set!(optimizer, "lr", 0)
    end
    @test params.layer_1.weight == before.layer_1.weight .- before.layer_1.weight
    some = Sotto.Optimizer(comm, Dict("a" => ones(Float32, 2), "b" => ones(Float32, 2)), sgd())
    wait(Sotto.step!(some, Dict("b" => ones(Float32, 2))))  # a dictionary has what was used
    @test Sotto.info(some).step == 1
    close(comm)
end

@testset "one rank" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    @test (Sotto.rank(comm), length(comm), isopen(comm)) == (0, 1, true)
    x, y = [1.0, 2.0], zeros(2)
    @test wait(Sotto.all_reduce!(comm, x, y)) === nothing
    @test y == x
    @test occursin("op is :median; allowed: :bit_or", failed(() -> Sotto.all_reduce!(comm, x; op = :median)).text)
    @test occursin("x has 1 array and out has 2", failed(() -> Sotto.all_reduce!(comm, x, (y, y))).text)
    @test failed(() -> Sotto.broadcast!(comm, x, 3)).status == :InvalidArgument
    for call in (() -> Sotto.all_gather!(comm, x, zeros(1)), () -> Sotto.all_reduce!(comm, x, zeros(3)))
        short = failed(call)
        @test short.status == :InvalidArgument && occursin("count", short.text)
    end
    op = Sotto.all_reduce!(comm, x)
    @test wait(op) === wait(op) === nothing && isready(op)
    codec = Sotto.Codec(comm, """{"type": "onebit"}""", Float32.(x))
    close(codec)
    closed = failed(() -> Sotto.all_reduce!(comm, Float32.(x); codec = codec))
    @test closed.text == failed(() -> Sotto.export_state(codec)).text == "this Codec is closed"
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
    tied = ones(Float32, 2)
    both = Sotto.Optimizer(comm, (a = tied, b = (tied,)), sgd())
    wait(Sotto.step!(both, (a = Float32[1, 2], b = ([10.0, 20.0],))))
    @test tied == [-10, -21]
    wait(Sotto.step!(both, (a = nothing, b = (view(ones(Float32, 4), [1, 4]),))))
    @test tied == [-11, -22]
    close(both)
    @test occursin("\"w\" has elements of type Float64", failed(() -> Sotto.Optimizer(comm, (w = ones(2),), sgd())).text)
    @test occursin("optimizer.typ: unknown key", failed(() -> Sotto.Optimizer(comm, params, """{"optimizer": {"typ": "SGD"}}""")).text)
    close(optimizer)
    @test failed(() -> Sotto.info(optimizer)).text == "this Optimizer is closed"
    close(comm)
end

const PERIOD_OF_2 = """{"preset": "co2", "period": 2, "auto_floor": false, "penalty": "none", "clip": "none", "beta": 0}"""

@testset "outer" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    params = (w = fill(5f0, 3, 3), b = fill(5f0, 2))
    outer = Sotto.Outer(comm, params, PERIOD_OF_2)
    events = map(1:4) do _
        foreach(x -> x .-= 0.5f0 .* (x .- 1f0), params)  # the inner step
        wait(Sotto.step!(outer))
        return Sotto.info(outer).events & ~Sotto.SOTTO_OUTER_WAITED
    end
    @test events == [0, Sotto.SOTTO_OUTER_LAUNCHED | Sotto.SOTTO_OUTER_HELD, 0,
        Sotto.SOTTO_OUTER_LAUNCHED | Sotto.SOTTO_OUTER_CONSUMED]
    @test all(==(2), params.w) && all(==(2), params.b)
    @test (Sotto.info(outer).step, Sotto.info(outer).round, Sotto.info(outer).in_flight) == (4, 1, 1)
    params.w .-= 0.25f0
    before = deepcopy(params)
    wait(Sotto.swap!(outer))
    @test all(==(2), params.w)
    wrong = failed(() -> Sotto.step!(outer))
    @test wrong.status == :InvalidState && occursin("anchor is in the place", wrong.text)
    wait(Sotto.swap!(outer))
    @test params == before
    @test Sotto.vote!(outer, 2) === Sotto.set!(outer, "loss", 1) === nothing
    @test failed(() -> Sotto.vote!(outer, -1)).text == "bits is -1; allowed: 0 to 4294967295"
    @test occursin("weight is 0.5; allowed: 0 or 1", failed(() -> Sotto.set!(outer, "weight", 0.5)).text)
    @test failed(() -> Sotto.set!(outer, "wait", 1)).status == :InvalidArgument
    @test failed(() -> Sotto.set!(outer, "retune", 1)).status == :InvalidState
    state = Sotto.export_state(outer)
    wait(Sotto.step!(outer))
    wait(Sotto.flush!(outer))
    flushed = deepcopy(params)
    @test Sotto.info(outer).votes == 2 && Sotto.info(outer).in_flight == 0
    other = Sotto.Outer(comm, deepcopy(before), replace(PERIOD_OF_2, "period\": 2" => "period\": 3"))
    wrong = failed(() -> Sotto.import_state!(other, state))
    @test wrong.status == :InvalidArgument && occursin("period", wrong.text)
    @test failed(() -> Sotto.import_state!(outer, state[1:9])).status == :InvalidArgument
    @test params == flushed
    @test occursin("mode is :best; allowed: :common", failed(() -> Sotto.export_state(outer, :best)).text)
    Sotto.import_state!(outer, state)
    @test params == before && Sotto.info(outer).step == 4
    wait(Sotto.step!(outer))
    wait(Sotto.flush!(outer))
    @test params == flushed
    wrong = failed(() -> Sotto.Outer(comm, params, """{"perid": 3}"""))
    @test wrong.status == :InvalidArgument && occursin("perid", wrong.text)
    @test occursin("\"w\" has elements of type Float64", failed(() -> Sotto.Outer(comm, (w = ones(2),), PERIOD_OF_2)).text)
    @test occursin("has no array", failed(() -> Sotto.Outer(comm, (), PERIOD_OF_2)).text)
    @test failed(() -> Sotto.flush!(outer; timeout = 5)) === nothing
    close(outer)
    close(outer)
    @test failed(() -> Sotto.step!(outer)).text == "this Outer is closed"
    @test occursin("2 parameters", string(other)) && occursin("closed", string(outer))
    close(comm)
    @test !isopen(other)
end

@testset "outer steps of an optimizer" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    params = (w = ones(Float32, 4),)
    plain = Sotto.Optimizer(comm, deepcopy(params), sgd())
    wrong = failed(() -> Sotto.Outer(plain))
    @test wrong.status == :InvalidState && occursin("has no outer steps", wrong.text)
    config = replace(sgd(), r"}\z" => """, "sotto": {"outer": $PERIOD_OF_2}}""")
    optimizer = Sotto.Optimizer(comm, params, config)
    outer, again = Sotto.Outer(optimizer), Sotto.Outer(optimizer)
    close(again)
    for _ in 1:4
        wait(Sotto.step!(optimizer, (w = ones(Float32, 4),)))
    end
    @test Sotto.info(outer).step == 4 && Sotto.info(outer).round == 1
    @test failed(() -> Sotto.step!(outer)).status == :InvalidState
    @test failed(() -> Sotto.export_state(outer)).status == :InvalidState
    @test failed(() -> Sotto.set!(outer, "lr", 1)).status == :InvalidState
    @test failed(() -> Sotto.Overlap(optimizer)).status == :Unsupported
    wait(Sotto.flush!(outer))
    @test params.w == fill(-3f0, 4)
    close(optimizer)
    @test !isopen(outer)
    close(outer)
    close(comm)
end

"A round of one rank, whose gradients become what they are."
function round!(overlap, which, arrays...)
    op = Sotto.begin!(overlap)
    Sotto.ready!(overlap, which, arrays...)
    Sotto.finish!(overlap)
    return wait(op)
end

@testset "overlap" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    x, y = rand(Float32, 4, 3), Float16[1, 2]
    overlap = Sotto.Overlap(comm, (x, y); moving = ==("2"))
    @test overlap.names == ["1", "2"]
    wrong = failed(() -> Sotto.ready!(overlap, 1))
    @test wrong.status == :InvalidState && occursin("no round of this overlap is open", wrong.text)
    @test failed(() -> Sotto.finish!(overlap)).status == :InvalidState
    @test failed(() -> Sotto.withdraw!(overlap)).status == :InvalidState
    op = Sotto.begin!(overlap; op = :sum, timeout = 10, priority = 1)
    @test failed(() -> Sotto.begin!(overlap)).status == :Busy
    @test failed(() -> Sotto.export_state(overlap)).status == :Busy
    @test failed(() -> Sotto.begin!(overlap; op = :max)).text == "op is :max; allowed: :mean, :sum"
    @test occursin("gradient \"2\" lies elsewhere", failed(() -> Sotto.ready!(overlap, 1:2)).text)
    @test failed(() -> Sotto.ready!(overlap, 3)).text == "which has gradient 3; allowed: 1 to 2"
    @test failed(() -> Sotto.unused!(overlap, [0])).text == "which has gradient 0; allowed: 1 to 2"
    @test failed(() -> Sotto.unused!(overlap, "w")).text == "which has gradient \"w\"; allowed: \"1\", \"2\""
    @test failed(() -> Sotto.unused!(overlap, (:w,))).text == "which has a Symbol; allowed: numbers and names of gradients"
    @test failed(() -> Sotto.ready!(overlap, 1:2, (x,))).text == "1 array for 2 gradients; give one for each"
    @test occursin("\"2\" is of type Nothing", failed(() -> Sotto.ready!(overlap, 1:2, (x, nothing))).text)
    @test occursin("\"2\", a SubArray", failed(() -> Sotto.ready!(overlap, 2, view(ones(Float16, 4), 1:2:3))).text)
    wrong = failed(() -> Sotto.ready!(overlap, 2, ones(Float16, 3)))
    @test wrong.status == :InvalidArgument && occursin("count is 3", wrong.text)
    @test failed(() -> Sotto.ready!(overlap, 2, ones(Float32, 2))).status == :InvalidArgument
    Sotto.ready!(overlap, "1")
    @test failed(() -> Sotto.ready!(overlap, "1")).status == :InvalidState
    @test Sotto.info(overlap).missing == 1
    wrong = failed(() -> Sotto.finish!(overlap))
    @test wrong.status == :InvalidState && occursin("1 of 2 gradients are missing", wrong.text)
    @test occursin("finish! or withdraw! comes first", failed(() -> wait(op)).text)
    Sotto.ready!(overlap, 2, y)
    Sotto.finish!(overlap)
    @test failed(() -> Sotto.withdraw!(overlap)).status == :InvalidState
    wait(op)
    @test y == Float16[1, 2] && Sotto.info(overlap).rounds == 1
    @test failed(() -> Sotto.export_state(overlap)).status == :InvalidState  # it has no codec
    @test occursin("\"bytes\"", Sotto.report(overlap, "buckets"))
    @test failed(() -> Sotto.report(overlap, "bucket")).status == :InvalidArgument
    op = Sotto.begin!(overlap)
    Sotto.withdraw!(overlap, "no more batches")
    wrong = failed(() -> wait(op))
    @test wrong.status == :Cancelled && occursin("no more batches", wrong.text)
    op = Sotto.begin!(overlap)
    close(overlap)
    close(overlap)
    @test failed(() -> wait(op)).status == :Cancelled
    @test failed(() -> Sotto.begin!(overlap)).text == failed(() -> Sotto.ready!(overlap, 1)).text == "this Overlap is closed"
    wrong = failed(() -> Sotto.Overlap(comm, [x], """{"bucket_byte": 1}"""))
    @test wrong.status == :InvalidArgument && occursin("bucket_byte", wrong.text)
    @test failed(() -> Sotto.Overlap(comm, [x, [1, 2]])).status == :Unsupported
    @test occursin("have no array of floating-point numbers", failed(() -> Sotto.Overlap(comm, (a = [1, 2],))).text)
    wrong = failed(() -> Sotto.Overlap(comm, Dict("a.b" => ones(Float32, 2), "a" => (b = ones(Float32, 2),))))
    @test wrong.text == "two gradients have the name \"a.b\""
    empty = Sotto.Overlap(comm, [Float32[], ones(Float32, 2)])
    @test round!(empty, 1:2) === nothing
    resized = [1f0, 2f0]
    empty = Sotto.Overlap(comm, [resized])
    push!(resized, 3f0)
    @test failed(() -> round!(empty, 1)).status == :InvalidArgument
    close(empty)
    tree = (dense = (weight = x, bias = ones(Float32, 2)), steps = 7)
    overlap = Sotto.Overlap(comm, tree, """{"unused": "zero", "codec": "int8"}""")
    @test round!(overlap, ["dense.bias"]) === nothing
    @test x == zeros(4, 3) && tree.dense.bias == ones(2)
    @test failed(() -> Sotto.begin!(overlap; op = :sum)).status == :InvalidArgument
    state = Sotto.export_state(overlap)
    @test failed(() -> Sotto.import_state!(overlap, state[1:9])).status == :InvalidArgument
    @test failed(() -> Sotto.export_state(overlap, :common)).status == :InvalidArgument
    close(comm)
    @test !isopen(overlap)
end

@testset "steps that begin early" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    params = (w = ones(Float32, 2, 2), inner = (b = ones(Float32, 3),))
    optimizer = Sotto.Optimizer(comm, params, sgd())
    @test failed(() -> Sotto.Overlap(optimizer, """{"wire": "fp16"}""")).status == :InvalidArgument
    overlap = Sotto.Overlap(optimizer, """{"unused": "zero"}""")
    op = Sotto.begin!(overlap)
    @test failed(() -> Sotto.step!(optimizer, deepcopy(params))).status == :Busy
    @test occursin("\"w\" lies elsewhere", failed(() -> Sotto.ready!(overlap, "w")).text)
    wrong = failed(() -> Sotto.ready!(overlap, "w", ones(Float32, 4)))
    @test wrong.text == "the gradient of \"w\" has size (4,), the parameter (2, 2)"
    Sotto.ready!(overlap, "w", transpose(Float64[1 2; 3 4]))
    Sotto.finish!(overlap)
    wait(op)
    @test params.w == 1 .- [1 3; 2 4] && params.inner.b == ones(3)
    @test Sotto.info(optimizer).step == 1
    saved = copy(params.w)
    op = Sotto.begin!(overlap)
    Sotto.ready!(overlap, "w", fill(NaN32, 2, 2))
    Sotto.finish!(overlap)
    @test failed(() -> wait(op)).status == :Nonfinite && params.w == saved
    @test failed(() -> Sotto.export_state(overlap)).status == :InvalidState
    op = Sotto.begin!(overlap)
    close(optimizer)  # its overlap withdraws: no step is in flight then
    @test !isopen(overlap) && failed(() -> wait(op)).status == :Cancelled
    @test params.w == saved
    close(overlap)
    close(comm)
end

"Arrays of which the collector says how many it has taken."
function counted(taken, n)
    x = fill(1f0, n)
    finalizer(x -> Threads.atomic_add!(taken, 1), x)
    return x
end

@testset "a round keeps its arrays alive, and then lets go of them" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    like, taken = (zeros(Float32, 1000), zeros(Float32, 10)), Threads.Atomic{Int}(0)
    overlap = Sotto.Overlap(comm, like; moving = name -> true)
    begun() = (op = Sotto.begin!(overlap); Sotto.ready!(overlap, 1, counted(taken, 1000)); op)
    op = begun()
    foreach(_ -> GC.gc(), 1:3)
    @test taken[] == 0
    Sotto.ready!(overlap, 2, counted(taken, 10))
    Sotto.finish!(overlap)
    wait(op)
    many(n) = for _ in 1:n
        round!(overlap, (2, 1), (counted(taken, 10), counted(taken, 1000)))
    end
    many(1000)
    foreach(_ -> GC.gc(), 1:3)
    @test taken[] >= 2000 && length(comm.flights) <= 1
    @test Sotto.info(overlap).rounds == 1001
    held = Sotto.info(overlap).state_bytes
    many(10)
    @test Sotto.info(overlap).state_bytes == held
    close(comm)
end

"Makes one of each, the overlaps with an open round, and drops them."
function drop_trainers(comm)
    params = (w = ones(Float32, 100),)
    Sotto.Outer(comm, params, PERIOD_OF_2)
    optimizer = Sotto.Optimizer(comm, params, sgd())
    for overlap in (Sotto.Overlap(optimizer), Sotto.Overlap(comm, params))
        Sotto.begin!(overlap)
    end
    local_steps = Sotto.Optimizer(comm, params, replace(sgd(), r"}\z" => """, "sotto": {"outer": $PERIOD_OF_2}}"""))
    Sotto.Outer(local_steps)
    return nothing
end

@testset "dropped outer optimizers and overlaps end with a later call" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    foreach(_ -> drop_trainers(comm), 1:20)
    for _ in 1:100
        GC.gc()
        wait(Sotto.barrier(comm))
        isempty(comm.dropped) && length(comm.flights) <= 1 && length(comm.owned) <= 6 && break
    end
    @test isempty(comm.dropped) && length(comm.flights) <= 1 && length(comm.owned) <= 6
    drop_trainers(comm)
    kept = Sotto.Overlap(comm, [ones(Float32, 4)])
    op = Sotto.begin!(kept)
    close(comm)  # with rounds that are open
    @test !isopen(kept) && failed(() -> wait(op)).status == :Cancelled
    @test isempty(comm.dropped) && isempty(comm.flights)
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

@testset "an interrupt loses nothing that was started" begin
    ccall(:jl_exit_on_sigint, Cvoid, (Cint,), 0)
    comm, call = Sotto.init(; size = 1, timeout = 20), Sotto.call_of()
    @test_throws InterruptException Sotto.started(comm, nothing) do out_op
        status = Sotto.sotto_barrier(comm.handle, call, out_op)
        ccall(:kill, Cint, (Cint, Cint), getpid(), 2)
        ccall(:usleep, Cint, (Cuint,), 100_000)  # until the signal is there
        return status
    end
    @test length(comm.flights) == 1 && comm.flights[1].handle != C_NULL
    wait(Sotto.barrier(comm))
    close(comm)
    @test isempty(comm.flights)
    ccall(:jl_exit_on_sigint, Cvoid, (Cint,), 1)
end

"One of each, used; half of them are closed, half left to the collector."
function cycle(comm, i)
    params = (w = zeros(Float32, 4096),)
    codec = Sotto.Codec(comm, """{"type": "onebit"}""", params.w)
    wait(Sotto.all_reduce!(comm, params.w; codec = codec))
    Sotto.all_reduce!(comm, zeros(Float32, 4096))  # dropped
    optimizer = Sotto.Optimizer(comm, params, sgd())
    wait(Sotto.step!(optimizer, deepcopy(params)))
    Sotto.import_state!(optimizer, Sotto.export_state(optimizer, :exact), :exact)
    outer, overlap = Sotto.Outer(comm, params, PERIOD_OF_2), Sotto.Overlap(comm, params)
    Sotto.begin!(overlap)
    part = split(comm, 0)
    wait(Sotto.barrier(part))
    close(part)
    i % 2 == 0 && foreach(close, (overlap, codec, optimizer, outer))
    i % 10 == 0 && close(Sotto.init(; size = 1))
    return nothing
end

struct Mallinfo  # of glibc: numbers of bytes
    fields::NTuple{10,Csize_t}
end

"Bytes that malloc has given away, threads and open files of this process. Pools of the collector have their own."
function held()
    of_malloc = ccall(:mallinfo2, Mallinfo, ()).fields
    return Int(of_malloc[5] + of_malloc[8]), length(readdir("/proc/self/task")), length(readdir("/proc/self/fd"))
end

@testset "1000 cycles leave nothing behind" begin
    comm = Sotto.init(; size = 1, timeout = 20)
    function cycles(n)
        foreach(i -> cycle(comm, i), 1:n)
        for _ in 1:3
            GC.gc()
            wait(Sotto.barrier(comm))
        end
        return held()
    end
    before, after = cycles(100), cycles(1000)
    @test after[1] < before[1] + 4_000_000  # the parameters alone of all cycles are 16 MB
    @test after[2:3] == before[2:3]
    @test length(Sotto.COMMS) == 1
    close(comm)
end
