"""Bytes that a rank sends in one all-reduce of n float32, by our algorithms."""

ONE_HOP_BYTES = 64 * 1024  # up to which a dense all-reduce sends everything to everybody
# elements and bytes of a unit of a compressed payload
UNITS = {"1bit": (8, 1), "bf16": (1, 2), "int8": (256, 260), "int4": (128, 68)}
TOPK_BLOCK, TOPK_OF_BLOCK = 4096, 64  # elements, and how many of them are sent


def chunk(n, ranks, rank):
    """Elements that a rank owns; borders on multiples of 16."""
    units = -(-n // 16)

    def border(k):
        return min(n, 16 * (k * (units // ranks) + min(k, units % ranks)))
    return border(rank + 1) - border(rank)


def padded(n, chunks):
    """Elements of each of so many chunks of a codec."""
    return 512 * -(-n // (512 * chunks))


def coded(method, elements):
    unit, size = UNITS[method]
    return elements // unit * size


def topk_block(elements):
    """Of the defaults: Elias-Fano or a bitmap, codes of 2 bits, two levels."""
    k = min(elements, max(1, (2 * elements * TOPK_OF_BLOCK + TOPK_BLOCK) // (2 * TOPK_BLOCK)))
    low = (elements // k).bit_length() - 1
    upper = k + ((elements - 1) >> low)
    index = 0 if k == elements else min(-(-k * low // 8) + -(-upper // 8), -(-elements // 8))
    return index + -(-2 * k // 8) + 4


def topk(n):
    """Of one tensor."""
    blocks, rest = divmod(n, TOPK_BLOCK)
    return blocks * topk_block(TOPK_BLOCK) + (topk_block(rest) if rest else 0)


def payload(method, n, ranks, rank):
    """In one level."""
    if method == "topk":
        return (ranks - 1) * topk(n)
    if method == "fp32":
        if 4 * n * (ranks - 1) <= ONE_HOP_BYTES:
            return 4 * n * (ranks - 1)
        return 4 * (n - chunk(n, ranks, rank) + (ranks - 1) * chunk(n, ranks, rank))
    return 2 * (ranks - 1) * coded(method, padded(n, ranks))


def between_hosts(method, n, hosts, per_host, rank):
    """In two levels, sharded: to ranks of other hosts."""
    if method == "fp32":
        return payload(method, chunk(n, per_host, rank % per_host), hosts, rank // per_host)
    return 2 * (hosts - 1) * coded(method, padded(n, hosts * per_host))


def flat_between_hosts(method, n, hosts, per_host, rank):
    """In one level: to ranks of other hosts, which are neighbours."""
    ranks, here = hosts * per_host, rank // per_host
    others = [r for r in range(ranks) if r // per_host != here]
    if method != "fp32":
        return 2 * len(others) * coded(method, padded(n, ranks))
    if 4 * n * (ranks - 1) <= ONE_HOP_BYTES:
        return 4 * n * len(others)
    return 4 * sum(chunk(n, ranks, r) + chunk(n, ranks, rank) for r in others)


def sharded(method, n, hosts, per_host, rank):
    """In two levels: shares of the sum in full precision inside the host, between hosts, and all shares inside the host."""
    local, total = rank % per_host, between_hosts(method, n, hosts, per_host, rank)
    if method == "fp32":
        share = chunk(n, per_host, local)
        return total + 4 * (n - share + (per_host - 1) * share)
    shard = hosts * padded(n, hosts * per_host)
    own = min(n, (local + 1) * shard) - min(n, local * shard)
    return total + 4 * (n - own) + (per_host - 1) * coded(method, shard)
