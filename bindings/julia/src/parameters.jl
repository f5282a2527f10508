# Trees of parameters: Flux's models, Lux's named tuples, or any nest of structs, tuples and arrays.

"""
    Sotto.children(x)

What a node of a tree has below it, as pairs of a name and a value; `nothing`: it is no tree. Fields
of structs, and entries of named tuples, tuples, dictionaries and vectors of anything but numbers. A
layer with arrays that are not trained has a method of its own:

    Sotto.children(layer::Flux.BatchNorm) = pairs(Flux.trainable(layer))
"""
children(x::NamedTuple) = pairs(x)
children(x::Union{Tuple,AbstractVector}) = pairs(x)
children(x::AbstractDict) = sort!(collect(x); by = entry -> string(first(entry)))
children(x::Union{Number,AbstractString,AbstractChar,Symbol,Module,Type,Nothing,Missing,IO,Ptr,Task}) = nothing
function children(x)
    names = fieldnames(typeof(x))
    isempty(names) && return nothing
    return [name => getfield(x, name) for name in names if isdefined(x, name)]
end

"""
    Sotto.parameters(tree)

All arrays of floating-point numbers in a tree, as pairs of a path and an array:
`"layers.1.weight" => [...]`. An array that is there twice, as tied weights are, is one parameter,
with its first path. The order is the same for equal trees.
"""
parameters(tree) = Pair{String,AbstractArray}[join(first(paths), '.') => x for (paths, x) in by_path(tree)]

const Path = Vector{String}

"Arrays, each with all the paths that lead to it."
function by_path(tree)
    found, seen = Tuple{Vector{Path},AbstractArray}[], IdDict{Any,Int}()
    collect_parameters!(found, seen, tree, Path())
    return found
end

# seen: where an array is in found; 0: no array.
function collect_parameters!(found, seen, x::AbstractArray{<:AbstractFloat}, path)
    if haskey(seen, x)
        push!(first(found[seen[x]]), path)
        return
    end
    push!(found, ([path], x))
    seen[x] = length(found)
    return
end
collect_parameters!(found, seen, x::AbstractArray{<:Number}, path) = nothing
function collect_parameters!(found, seen, x, path)
    below = children(x)
    below === nothing && return
    if is_mutable(x)
        haskey(seen, x) && return  # a tree that contains itself
        seen[x] = 0
    end
    for (name, value) in below
        collect_parameters!(found, seen, value, [path; string(name)])
    end
    return
end

# The name of this question has changed in 1.5.
is_mutable(x) = @static isdefined(Base, :ismutable) ? ismutable(x) : !isimmutable(x)

"""
The value at a path of a tree of gradients; `nothing`: there is none. A dictionary has what was used,
as Zygote makes it; of all else the entry has to be there, `nothing` for none.
"""
function at_path(tree, path)
    for (depth, step) in enumerate(path)
        tree === nothing && return nothing
        tree = entry(tree, path, depth)
    end
    return tree
end

function entry(tree, path, depth)
    node = unwrapped(tree)
    for (name, value) in something(children(node), ())
        string(name) == path[depth] && return value
    end
    node isa AbstractDict && return nothing
    place = depth == 1 ? "the gradients" : "the gradient at \"$(join(path[1:depth-1], '.'))\""
    invalid("$place, a $(typeof(node)), has no \"$(path[depth])\", as the parameters have; nothing in its place counts as zero")
end

"What Zygote has for a mutable struct, such as Flux's BatchNorm: its fields in a reference."
unwrapped(x) = x
unwrapped(x::Base.RefValue) = isassigned(x) && x[] isa NamedTuple ? x[] : x
