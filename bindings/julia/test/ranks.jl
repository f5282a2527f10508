# Sotto.jl on several ranks: sotto-run -n 4 -- julia ranks.jl collectives|training|death

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
    interrupted(comm)
    wrong = try
        wait(Sotto.barrier(comm))
        wait(Sotto.all_reduce!(comm, zeros(rank + 1)))
    catch error
        error
    end
    expect(wrong isa Sotto.SottoError && wrong.status == :Protocol, "counts that differ: $wrong")
end

"Ctrl-C ends the wait of rank 0, not what it has waited for."
function interrupted(comm)
    pids = zeros(Int32, length(comm))
    wait(Sotto.all_gather!(comm, [Int32(getpid())], pids))
    if Sotto.rank(comm) == 0
        ccall(:jl_exit_on_sigint, Cvoid, (Cint,), 0)
        x = zeros(1000)
        op = Sotto.recv!(comm, x, 1)
        wait(Sotto.send(comm, [1], 1))
        caught = try
            wait(op)
        catch error
            error
        end
        expect(caught isa InterruptException && !isready(op), "$caught")
        wait(Sotto.send(comm, [2], 1))
        wait(op)
        expect(all(==(7), x), "what was received behind the interrupt")
        ccall(:jl_exit_on_sigint, Cvoid, (Cint,), 1)
    elseif Sotto.rank(comm) == 1
        wait(Sotto.recv!(comm, [0], 0))
        sleep(0.2)
        ccall(:kill, Cint, (Cint, Cint), pids[1], 2)
        wait(Sotto.recv!(comm, [0], 0))
        wait(Sotto.send(comm, fill(7.0, 1000), 0))
    end
    return nothing
end

"The error that a call, or the operation that it returns, has ended with."
function error_of(call)
    try
        wait(call())
    catch error
        error isa Sotto.SottoError || rethrow()
        return error
    end
    error("no error")
end

"Whether all ranks have the same bits."
function same(comm, x)
    theirs = copy(x)
    wait(Sotto.broadcast!(comm, theirs))
    return theirs == x
end

adam(more = "") = """{"optimizer": {"type": "Adam", "params": {"lr": 0.01}}$more}"""

values(n, seed, step) = Float32[sin(i * (seed + 1) + step) for i in 1:n]

"Outer steps have the bits of the collective and of the optimizer that they consist of."
function outer(comm)
    rank = Sotto.rank(comm)
    w = ones(Float32, 1000)
    mean = Sotto.Outer(comm, (w = w,), """{"preset": "local_sgd", "period": 3}""")
    for step in 1:6
        step == 4 && Sotto.vote!(mean, 1 << rank)
        w .+= values(1000, rank, step)
        wanted = copy(w)
        step % 3 == 0 && wait(Sotto.all_reduce!(comm, wanted; op = :mean))
        wait(Sotto.step!(mean))
        expect(w == wanted, "outer step $step is not the mean")
    end
    expect(Sotto.info(mean).votes == 15, "votes")
    # Two shards of 8 elements: the mean of 0 and 1 is 2 long, and 1 is allowed.
    of_shard, shards = split(comm, rank % 2), split(comm, rank ÷ 2)
    v = zeros(Float32, 8)
    cut = Sotto.Outer(of_shard, (v = v,), """{"preset": "co2", "period": 1, "delay": 0, "penalty": "none", "beta": 0,
        "auto_floor": false, "clip": "norm", "phi": 1}"""; shards = shards)
    v .+= rank ÷ 2
    wait(Sotto.step!(cut))
    expect(all(v .== 0.25f0), "a norm over shards: $(v[1])")
    foreach(close, (cut, of_shard, shards))
    section = """{"preset": "co2", "period": 3, "codec": "onebit"}"""
    alone = split(comm, rank)
    a, b = (w = ones(Float32, 500), v = zeros(Float32, 3)), (w = ones(Float32, 500), v = zeros(Float32, 3))
    whole = Sotto.Optimizer(comm, a, adam(", \"sotto\": {\"outer\": $section}"))
    inner, by_hand = Sotto.Optimizer(alone, b, adam()), Sotto.Outer(comm, b, section)
    flushing = Sotto.Outer(whole)
    state = UInt8[]
    for step in 1:14
        grads = (w = values(500, rank, step), v = values(3, rank, step))
        wait(Sotto.step!(whole, grads))
        wait(Sotto.step!(inner, grads))
        wait(Sotto.step!(by_hand))
        expect(a == b, "inner step $step")
        if step == 8  # an average is under way; the outer optimizer is made anew
            state = Sotto.export_state(by_hand)
            close(by_hand)
            by_hand = Sotto.Outer(comm, (w = zeros(Float32, 500), v = zeros(Float32, 3)), section)
            expect(error_of(() -> Sotto.import_state!(by_hand, state[1:99])).status == :InvalidArgument, "half a state")
            close(by_hand)
            b.w .= 0
            b.v .= 0
            by_hand = Sotto.Outer(comm, b, section)
            Sotto.import_state!(by_hand, state)
            expect(a == b, "the state")
        end
    end
    expect(same(comm, a.w) == (rank == 0), "local steps are alike")
    wait(Sotto.flush!(flushing))
    wait(Sotto.flush!(by_hand))
    expect(a == b && same(comm, a.w), "flush")
    expect(Sotto.info(flushing).round == Sotto.info(by_hand).round > 2, "rounds")
    theirs = copy(a.w)
    rank == 1 && (theirs[5] += 1)
    differ = error_of(() -> Sotto.Outer(comm, (w = theirs,), section))
    expect(differ.status == :Protocol, "values that differ: $differ")
    close(inner)
    close(alone)
    close(whole)
    expect(!isopen(flushing), "outer steps of an optimizer that is closed")
end

const SMALL = """{"first_bucket_bytes": 100, "bucket_bytes": 3000}"""

"Means of rounds have the bits of one all-reduce, in whatever order gradients are ready."
function overlap(comm)
    rank = Sotto.rank(comm)
    tree = (layers = ((weight = zeros(Float32, 30, 30), bias = zeros(Float32, 7)), (weight = zeros(Float32, 300),)),
        half = zeros(Float16, 50))
    names, gradients = first.(Sotto.parameters(tree)), last.(Sotto.parameters(tree))
    overlap = Sotto.Overlap(comm, tree, SMALL)
    moving = Sotto.Overlap(comm, gradients, SMALL; moving = name -> true)
    expect(Sotto.info(overlap).buckets > 1, "one bucket")
    orders = [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3], circshift([3, 1, 4, 2], rank)]
    for (round, order) in enumerate(orders), reduction in (:mean, :sum)
        foreach(i -> gradients[i] .= sin.(reshape(1:length(gradients[i]), size(gradients[i])) .* (rank + i + round)), 1:4)
        wanted, elsewhere = deepcopy(gradients), deepcopy(gradients)
        wait(Sotto.all_reduce!(comm, wanted; op = reduction))
        op, other = Sotto.begin!(overlap; op = reduction), Sotto.begin!(moving; op = reduction)
        if round % 2 == 1
            foreach(i -> Sotto.ready!(overlap, names[i]), order)
            Sotto.ready!(moving, order, elsewhere[order])
        else
            @sync for i in order
                Threads.@spawn (Sotto.ready!(overlap, i); Sotto.ready!(moving, i, elsewhere[i]); GC.gc(false))
            end
        end
        Sotto.finish!(moving)
        Sotto.finish!(overlap)
        wait(op)
        wait(other)
        expect(gradients == wanted == elsewhere, "round $round, $reduction")
    end
    feedback(comm)
    early_steps(comm)
    given_up(comm, gradients)
end

"Error feedback of a codec is kept, saved and put back."
function feedback(comm)
    x = zeros(Float32, 5000)
    overlap = Sotto.Overlap(comm, x, """{"codec": "int4"}""")
    function round_of(step)
        x .= values(5000, Sotto.rank(comm), step)
        op = Sotto.begin!(overlap)
        Sotto.ready!(overlap, 1)
        Sotto.finish!(overlap)
        wait(op)
        return copy(x)
    end
    round_of(1)
    state = Sotto.export_state(overlap)
    wanted = round_of(2)
    expect(round_of(2) != wanted, "no error feedback")
    Sotto.import_state!(overlap, state)
    expect(round_of(2) == wanted, "error feedback of the state")
    Sotto.import_state!(overlap, Sotto.export_state(overlap, :mean), :mean)
    Sotto.import_state!(overlap, state, :reset)
    bad = error_of(() -> round_of(Sotto.rank(comm) == 3 ? NaN32 : 1f0))
    expect(bad.status == :Nonfinite && occursin("rank 3", bad.text), "$bad")
    close(overlap)
end

"Steps that begin early have the bits of those that do not."
function early_steps(comm)
    rank = Sotto.rank(comm)
    for config in (adam(), """{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}}""")
        a, b = (w = ones(Float32, 40, 5), v = ones(Float32, 3)), (w = ones(Float32, 40, 5), v = ones(Float32, 3))
        plain, early = Sotto.Optimizer(comm, a, config), Sotto.Optimizer(comm, b, config)
        overlap = Sotto.Overlap(early)
        for step in 1:6
            grads = (w = reshape(values(200, rank, step), 40, 5), v = values(3, rank, step))
            wait(Sotto.step!(plain, grads))
            op = Sotto.begin!(overlap)
            foreach(name -> Sotto.ready!(overlap, name, grads[Symbol(name)]), step % 2 == 0 ? ["v", "w"] : ["w", "v"])
            Sotto.finish!(overlap)
            wait(op)
            expect(a == b, "early step $step of $config")
        end
        foreach(close, (plain, early))
    end
end

"A rank withdraws, or drops an overlap whose round is open: the others are told, and the group goes on."
function given_up(comm, gradients)
    rank = Sotto.rank(comm)
    overlap = Sotto.Overlap(comm, gradients, """{"unused": "zero"}""")
    op = Sotto.begin!(overlap)
    rank == 1 ? Sotto.withdraw!(overlap, "no memory") : (Sotto.unused!(overlap, 2:3); Sotto.finish!(overlap))
    cancelled = error_of(() -> op)
    expect(cancelled.status == :Cancelled && occursin("rank 1 has withdrawn: no memory", cancelled.text), "$cancelled")
    op, others = open_round(comm, gradients)
    rank == 2 && foreach(_ -> GC.gc(), 1:3)
    expect(rank != 2 || !isempty(comm.dropped), "an overlap that was not collected")
    wait(Sotto.barrier(comm))  # rank 2 withdraws here, and waits for no other rank's round
    if others !== nothing
        Sotto.ready!(others, 1:4)
        Sotto.finish!(others)
    end
    cancelled = error_of(() -> op)
    expect(cancelled.status == :Cancelled && occursin("rank 2 has withdrawn: the overlap was dropped", cancelled.text), "$cancelled")
    foreach(x -> x .= rank, gradients)
    op = Sotto.begin!(overlap)
    rank == 3 ? Sotto.unused!(overlap, 3) : Sotto.ready!(overlap, 3)
    Sotto.ready!(overlap, [1, 2, 4])
    Sotto.finish!(overlap)
    wait(op)
    expect(all(i -> all(==(i == 3 ? 0.75 : 1.5), gradients[i]), 1:4), "the next round")
end

"A round, and the overlap where it is not dropped. Another frame would keep it alive."
@noinline function open_round(comm, gradients)
    overlap = Sotto.Overlap(comm, gradients)
    op = Sotto.begin!(overlap)
    return op, Sotto.rank(comm) == 2 ? nothing : overlap
end

function training(comm)
    outer(comm)
    overlap(comm)
end

"Rank 1 dies; the others say so, within the deadline, in a round of an overlap as in a collective."
function death(comm)
    overlap = Sotto.Overlap(comm, [zeros(Float32, 100)])
    round = Sotto.begin!(overlap)
    wait(Sotto.barrier(comm))
    Sotto.rank(comm) == 1 && ccall(:kill, Int32, (Int32, Int32), getpid(), 9)
    begun = time()
    try
        Sotto.ready!(overlap, 1)
        Sotto.finish!(overlap)
    catch error
        error isa Sotto.SottoError && error.status == :PeerLost || rethrow()
    end
    for lost in (error_of(() -> round), error_of(() -> Sotto.all_reduce!(comm, zeros(100))))
        expect(lost.status == :PeerLost && occursin("rank 1", lost.text), "$lost")
    end
    expect(time() - begun < 20, "the loss was told late")
end

comm = Sotto.init(; timeout = 30)
Dict("collectives" => collectives, "training" => training, "death" => death)[ARGS[1]](comm)
try
    close(comm)
catch error
    error isa Sotto.SottoError || rethrow()
end
println("rank $(Sotto.rank(comm)) is well")
