# Sotto.jl on several ranks: sotto-run -n 4 -- julia ranks.jl collectives|death

using Sotto

function expect(condition, text)
    condition || error(text)
    return nothing
end

function collectives(comm)
    rank, n = Sotto.rank(comm), length(comm)
    total = n * (n - 1) ÷ 2
    x, y = fill(Float32(rank), 1000), [rank, -rank]
    op = Sotto.all_reduce!(comm, (x, view(y, 1:1)); op = :sum)
    GC.gc()  # arrays of an operation in flight stay
    wait(op)
    expect(all(==(total), x) && y == [total, -rank], "all_reduce")
    wait(Sotto.broadcast!(comm, x .= rank, 2))
    expect(all(==(2), x), "broadcast")
    parts = zeros(Int, 2, n)
    wait(Sotto.all_gather!(comm, [rank, 10rank], parts))
    expect(parts == [0:n-1 10 .* (0:n-1)]', "all_gather")
    part = zeros(Int, 2)
    wait(Sotto.reduce_scatter!(comm, vec(parts), part; op = :max))
    expect(part == [rank, 10rank], "reduce_scatter")
    out = [-1.0]
    wait(Sotto.reduce!(comm, [1.0 + rank], out, 1; op = :min))
    expect(out == [rank == 1 ? 1.0 : -1.0], "reduce")
    rank == 0 && wait(Sotto.send(comm, [7, 8], 1; tag = 5))
    rank == 1 && wait(Sotto.recv!(comm, part, 0; tag = 5))
    expect(rank != 1 || part == [7, 8], "send and recv")
    codec = Sotto.Codec(comm, """{"type": "onebit"}""", x)
    wait(Sotto.all_reduce!(comm, fill!(x, rank + 1); codec = codec))
    expect(abs(sum(x) / 1000 - (total / n + 1)) < 1e-3, "codec")
    expect(length(Sotto.export_state(codec)) > 0, "state of the codec")
    half = split(comm, rank % 2; key = -rank)
    expect(length(half) == n ÷ 2 && Sotto.rank(half) == (n - 1 - rank) ÷ 2, "split")
    wait(Sotto.barrier(half))
    close(half)
    expect(split(comm, nothing) === nothing, "split without a color")
    # Dropped operations, and many at a time.
    ops = [Sotto.all_reduce!(comm, fill(Float64(i), 10i); op = :mean) for i in 1:50]
    foreach(wait, ops[2:2:50])
    if rank == 0
        late = Sotto.recv!(comm, part, 1)
        early = try
            wait(late; timeout = 0.05)
        catch error
            error
        end
        expect(early isa Sotto.SottoError && early.status == :Timeout && !isready(late), "$early")
        wait(Sotto.send(comm, [1], 1))
        wait(late)
    elseif rank == 1
        wait(Sotto.recv!(comm, view(part, 1:1), 0))
        wait(Sotto.send(comm, part, 0))
    end
    wrong = try
        wait(Sotto.barrier(comm))
        wait(Sotto.all_reduce!(comm, zeros(rank + 1)))
    catch error
        error
    end
    expect(wrong isa Sotto.SottoError && wrong.status == :Protocol, "counts that differ: $wrong")
end

"Rank 1 dies; the others say so, within the deadline."
function death(comm)
    wait(Sotto.barrier(comm))
    Sotto.rank(comm) == 1 && ccall(:kill, Int32, (Int32, Int32), getpid(), 9)
    begun = time()
    lost = try
        wait(Sotto.all_reduce!(comm, zeros(100)))
    catch error
        error
    end
    expect(lost isa Sotto.SottoError && lost.status == :PeerLost && occursin("rank 1", lost.text), "$lost")
    expect(time() - begun < 20, "the loss was told late")
end

comm = Sotto.init(; timeout = 30)
ARGS[1] == "collectives" ? collectives(comm) : death(comm)
try
    close(comm)
catch error
    error isa Sotto.SottoError || rethrow()
end
println("rank $(Sotto.rank(comm)) is well")
