"""
Collectives in few bits and the optimizers for them: `libsotto.so` for Julia.

    using Sotto
    comm = Sotto.init()                       # under sotto-run, torchrun, mpirun or srun
    x = fill(Float32(Sotto.rank(comm)), 1000)
    wait(Sotto.all_reduce!(comm, x; op = :mean))
    close(comm)

`Sotto.init`, collectives, `Codec`, `Optimizer`, `Outer`, `Overlap` and `parameters` are the
interface; `Sotto.sotto_*` are the functions of the C header as they are.
"""
module Sotto

using Libdl

include("text.jl")
include("library.jl")
include("abi.jl")
include("errors.jl")
include("structs.jl")
include("buffers.jl")
include("comm.jl")
include("op.jl")
include("collectives.jl")
include("codec.jl")
include("parameters.jl")
include("optimizer.jl")
include("outer.jl")
include("overlap.jl")

__init__() = atexit(close_all)

end
