# A trainer in one page: linear regression with the optimizer of a DeepSpeed file, on several ranks.
#
#     sotto-run -n 4 -- julia --project=bindings/julia trainer.jl CONFIG.json [RECORDING]
#
# Every rank has samples of its own; Sotto averages what they learn from them. With RECORDING the
# parameters and gradients are those that `bindings/tests/record.c` has written of another trainer to
# RECORDING.rank<R>. Rank 0 prints a hash of the parameters at the end: equal hashes, equal
# parameters, bit for bit.

using Sotto

include("recording.jl")

const INPUTS, BATCH, STEPS = 64, 16, 900  # BATCH: samples per rank and step

"Numbers that follow from a seed: uniform in -1 .. 1."
mutable struct Uniform
    state::UInt64
end

function next!(random::Uniform)
    random.state = random.state * 6364136223846793005 + 1442695040888963407
    return Float32(random.state >> 40) / Float32(1 << 23) - 1f0
end

"The task: find the weights that made the targets."
function loss_and_gradient!(grad, random, truth, w)
    loss = 0.0
    fill!(grad, 0)
    for _ in 1:BATCH
        x = [next!(random) for _ in truth]
        error = sum(x .* (w .- truth))
        grad .+= error .* x ./ BATCH
        loss += 0.5 * error^2 / BATCH
    end
    return loss
end

function train(comm, config)
    same_everywhere = Uniform(12345)
    truth = [0.1f0 * next!(same_everywhere) for _ in 1:INPUTS]
    params, grads = (weights = fill(0.01f0, INPUTS),), (weights = zeros(Float32, INPUTS),)
    optimizer = Sotto.Optimizer(comm, params, config)
    random, first = Uniform(Sotto.rank(comm) + 1), 0.0
    for step in 0:STEPS-1
        loss = loss_and_gradient!(grads.weights, random, truth, params.weights)
        wait(Sotto.step!(optimizer, grads))
        if step % 100 == 0 || step + 1 == STEPS
            mean = [loss]
            wait(Sotto.all_reduce!(comm, mean; op = :mean))
            Sotto.rank(comm) == 0 && println("step $step  loss $(round(mean[1]; digits = 4))")
            first = step == 0 ? mean[1] : first
            step + 1 == STEPS && mean[1] > 0.2 * first && error("the loss is $(mean[1]), it was $first")
        end
    end
    return optimizer
end

function repeat_recording(comm, config, path)
    recording = read_recording(path)
    groups = Dict(tensor.name => tensor.group for tensor in recording.tensors)
    named = NamedTuple{Tuple(Symbol(tensor.name) for tensor in recording.tensors)}  # in this order
    params = named(Tuple(tensor.values for tensor in recording.tensors))
    optimizer = Sotto.Optimizer(comm, params, config; group = name -> groups[name])
    for step in recording.steps
        wait(Sotto.step!(optimizer, named(Tuple(step))))
    end
    return optimizer
end

"FNV-1a over all parameters."
function params_hash(optimizer)
    hash = 0xcbf29ce484222325
    for param in optimizer.params, byte in reinterpret(UInt8, vec(param))
        hash = (hash ⊻ byte) * 0x100000001b3
    end
    return string(hash; base = 16, pad = 16)
end

function main(arguments)
    length(arguments) in (1, 2) || error("usage: trainer.jl CONFIG.json [RECORDING]")
    config, comm = read(arguments[1], String), Sotto.init()
    optimizer = length(arguments) == 1 ? train(comm, config) :
        repeat_recording(comm, config, "$(arguments[2]).rank$(Sotto.rank(comm))")
    info, bytes = Sotto.info(optimizer), Sotto.counters(comm).payload_bytes_sent
    Sotto.rank(comm) == 0 && println("$(info.step) steps, stage $(info.stage), $bytes bytes, ",
        "params_hash $(params_hash(optimizer))")
    close(optimizer)
    close(comm)
end

main(ARGS)
