"""Sums, norms and the update of the outer optimizers (co2-overlap.md, sections 4.3, 4.4 and 13), bit for bit.

Elements are float32 and every sum and product is rounded once. Scalars are float64 and rounded once where they meet an
element (4.3, "Precision").
"""
import math

import numpy as np

from model import f32, sum_of_squares

GROUP = 8  # ranks whose terms are added before they join the sum (1-bit specification, 1.6)


def sum_of_ranks(terms):
    """Ranks in ascending order, in groups of 8, float32 from 0. terms: one array per rank, None: not part of it.

    Decided: groups go by the number of the rank, also where ranks are left out.
    """
    total = f32(0)
    for group in range(0, len(terms), GROUP):
        partial = f32(0)
        for term in terms[group : group + GROUP]:
            if term is not None:
                partial = partial + term
        total = total + partial
    return total


def mean_of_ranks(terms):
    """Section 13, "Average": the sum times fl(1/W), W the ranks that take part (14, SKIP_RANK). None: nobody does.

    Decided: one rank without others has no transport (14), so its term stays as it is, -0 included.
    """
    count = sum(term is not None for term in terms)
    if count == 0:
        return None
    if len(terms) == 1:
        return terms[0].copy()
    return sum_of_ranks(terms) * (f32(1) / f32(count))


def norm_squared(x, tensors):
    """4.3, "Norms over a fragment": sums of squares of tensors, added in float64 in registered order."""
    total = 0.0
    for tensor in tensors:
        total += sum_of_squares([x[tensor]])
    return total


def norms(x, segments):
    """One norm per segment (a list of tensors), each rounded to float32 and then held as float64."""
    return np.array([float(f32(math.sqrt(norm_squared(x, tensors)))) for tensors in segments])


def penalty(mode, gap, unit, eps=0.0, lambda_max=math.inf, floor=0.0):
    """Lambda of 4.3 in float64, scalars or arrays of segments. unit: of the gap; the constant for mode const.

    gap 0 gives 1 without a division; the floor comes after the clamp, const is not clamped; NaN stays NaN.
    """
    gap, unit = np.asarray(gap, np.float64), np.asarray(unit, np.float64)
    if mode == "none":
        ratio = np.ones_like(gap)
    elif mode == "const":
        ratio = np.zeros_like(gap) + unit
    else:
        with np.errstate(all="ignore"):
            clamped = np.minimum(np.maximum(1.0 + gap / (unit + eps), 1.0), lambda_max)
        ratio = np.where(gap == 0, 1.0, clamped)
    return np.maximum(ratio, floor)


def clamped(m, phi):
    """min(max(m, -phi), phi) of 4.4; NaN stays NaN. Also the share of elements that changed."""
    out = np.where(m < -phi, -phi, m)
    out = np.where(out > phi, phi, out).astype(f32)
    return out, float((np.abs(m) > phi).mean()) if len(m) else 0.0


def clip(m, mode, phi, tensors):
    """4.4. phi: float64; rms: the factor c. Returns m and the share of elements that changed.

    Decided: the quotient of mode norm is that of the float64 phi, and so is the comparison before it.
    """
    if mode == "none" or len(m) == 0:
        return m, 0.0
    if mode == "coord":
        return clamped(m, f32(phi))
    squares = norm_squared(m, tensors)
    if mode == "rms":
        return clamped(m, f32(phi * float(f32(math.sqrt(squares / len(m))))))
    norm = float(f32(math.sqrt(squares)))
    return (m * f32(phi / norm), 1.0) if norm > phi else (m, 0.0)


def apply(anchor, m, d, inv_lambda, alpha, beta, rule, clipper=None, correction=None):
    """The update of section 13. Returns anchor, momentum, the anchor's movement alpha*step, and the clipped share.

    d: Dbar, minus alpha_prev*step_prev for form ANCHOR_DIFF. inv_lambda: float32, one or one per element. alpha: with
    lr_normalised alpha*gamma. clipper: m -> (m, share). correction: (lambda, fresh, prev) where freshness > 0 (5).
    Decided: rule none has no momentum, so a clip does nothing there.
    """
    alpha, beta = f32(alpha), f32(beta)
    v = d * inv_lambda
    g = v
    if correction is not None:
        freshness, fresh, prev = correction
        g = v + f32(freshness) * ((fresh - prev) + (d - v))
    share = 0.0
    if rule == "none":
        step = g
    else:
        m = beta * m + g
        if clipper is not None:
            m, share = clipper(m)
        step = beta * m + g if rule == "nesterov" else m
    moved = alpha * step
    return anchor - moved, m, moved, share


def merged(merge, a, x, anchor, start):
    """Live after a consumption (section 3, "Merge rules"). start: live at the launch, for add_progress."""
    if merge == "reset":
        return anchor.copy()
    if merge == "add_progress":
        return anchor + (x - start)
    a, rest = f32(a), f32(1.0 - a)
    return a * x + rest * anchor if merge == "lerp" else rest * x + a * anchor
