"""The outer optimizers in numpy, written from their specification: CO2, SlowMo, DiLoCo and its relatives.

Independent of the library: nothing here is shared with it. All ranks live in one object; results are compared bit for
bit. Sections are those of co2-overlap.md. Settings are in outer_settings.py, the arithmetic of elements and scalars in
outer_arithmetic.py, codecs in outer_codecs.py.
"""
import copy
import dataclasses

import numpy as np

from model import f32
from outer_arithmetic import apply, clip, mean_of_ranks, merged, norms, penalty
from outer_codecs import Identity, NonFinite, codec_of
from outer_settings import GAPS

# Decided: 4.1 has no number for gamma_min; it is the least gamma whose inverse float32 holds.
GAMMA_MIN = 2.0**-126


class InvalidState(RuntimeError):
    """A call at a moment that does not allow it, as status INVALID_STATE."""


@dataclasses.dataclass
class Event:
    """What a step did with one fragment. Numbers are those of rank 0, of the last consumption."""

    fragment: int
    launched: bool = False
    # An average came in. Decided: with freshness also the first boundary, which moves anchors (13, t = 0).
    consumed: bool = False
    held: bool = False  # first boundary with delay = period: merge with the anchor as it is
    ratio: object = None  # Lambda, one per segment or element
    gap: object = None
    unit: object = None
    clipped: float = 0.0
    skipped: tuple = ()  # ranks whose payload was left out of the launch


@dataclasses.dataclass
class Pending:
    """A reduction in flight, complete for the model."""

    average: object  # Dbar, or the mean of live values; None: all ranks were skipped
    own: list  # what each rank sent: fresh at the launch, prev at the consumption (13)
    anchor: object  # of the launch, for payload params with form delta
    starts: object  # live at the launch, for add_progress
    gap: object  # rank 0's gap in the trailer, for consensus
    first: object  # mean norm of the first inner steps, for gap_inner
    moved: object = None  # s of 4.1 per own state: what the update at the launch step did after the snapshot


class Fragment:
    """One fragment on all ranks: its tensors as one vector in order of registration.

    State that is common to all ranks exists once; with freshness every rank has its own (section 5).
    """

    mean_of_ranks = staticmethod(mean_of_ranks)

    def __init__(self, settings, index, sizes, world, start):
        self.settings, self.index, self.world = settings, index, world
        starts = np.cumsum([0, *sizes])
        self.tensors = [slice(int(at), int(at) + size) for at, size in zip(starts, sizes)]
        whole = settings.granularity != "tensor"
        self.segments = [self.tensors] if whole else [[tensor] for tensor in self.tensors]
        self.lengths = np.array([sum(t.stop - t.start for t in segment) for segment in self.segments])
        self.offset = index * (settings.period // len(settings.fragments or [0]))
        self.codec = codec_of(settings, sizes, world)
        self.dense = Identity(world)
        self.launches = 0
        self.reset(start)

    def reset(self, start):
        """Creation, and the switch of sections 6 and 9.4: A = x, m = 0."""
        owners = self.world if self.settings.freshness > 0 else 1
        self.anchors = [start.copy() for _ in range(owners)]
        self.momenta = [np.zeros_like(start) for _ in range(owners)]
        self.gaps = [np.zeros(len(self.segments)) for _ in range(owners)]  # norm of the last update
        self.averages = [np.zeros(len(self.segments)) for _ in range(owners)]  # C of gap_ema
        self.pending, self.first = None, None
        self.steps = 0  # inner steps whose work no launch has taken and no merge has dropped
        self.begins = True  # the next inner step is the first of its round

    def owner(self, rank):
        return rank if len(self.anchors) > 1 else 0

    # Launch

    def inner_step(self, x):
        """Before anything else of a step. gap_inner: norm of x_1 - x_0, where x_0 is the anchor (section 2).

        Decided: with merge lerp too, so that no tensor of the size of the model is kept (4.3).
        """
        self.steps += 1
        if self.begins and self.settings.penalty == "gap_inner":
            self.first = [norms(x[r] - self.anchors[self.owner(r)], self.segments) for r in range(self.world)]
        self.begins = False

    def launch(self, x, event):
        """Payload, average and trailer of section 3, LAUNCH. Sets `pending`."""
        s = self.settings
        self.launches += 1
        values = x
        if s.payload == "delta":
            values = [self.anchors[self.owner(r)] - x[r] for r in range(self.world)]
        bad = {r for r in range(self.world) if not np.isfinite(values[r]).all()}
        codec = self.dense if self.launches <= s.dense_rounds else self.codec
        # Decided: codecs have no code for a NaN, so "pass" means "error" where one is at work.
        if bad and (s.nonfinite == "error" or (s.nonfinite == "pass" and not isinstance(codec, Identity))):
            raise NonFinite(f"fragment {self.index}: ranks {sorted(bad)}")
        skipped = set() if s.nonfinite == "pass" else set(bad)
        for r in range(self.world):
            if r in skipped:
                codec.skip(r, values[r])
            elif not codec.encode(r, values[r]):
                # Decided: what overflows in a codec counts as a payload that is not finite.
                if s.nonfinite != "skip_rank":
                    raise NonFinite(f"fragment {self.index}: rank {r} in the codec")
                skipped.add(r)
        included = [r for r in range(self.world) if r not in skipped]
        # Decided: the round's work of a skipped rank is dropped, in its own correction (5) as well.
        own = [np.zeros_like(values[r]) if r in skipped else codec.sent[r].copy() for r in range(self.world)]
        first = None
        if self.first is not None:
            terms = [None if r in skipped else self.first[r].astype(f32) for r in range(self.world)]
            first = mean_of_ranks(terms)
        self.pending = Pending(
            average=codec.average(included) if included else None, own=own, anchor=self.anchors[0].copy(),
            starts=[v.copy() for v in x] if s.merge == "add_progress" else None, gap=self.gaps[0].copy(), first=first)
        self.steps, self.begins = 0, True
        event.launched, event.skipped = True, tuple(sorted(skipped))

    # Consumption

    def measured(self, k, taken, d, moved):
        """Gap and unit of 4.3 for the own state k. moved: s, None where it is zero by section 4.1."""
        s = self.settings
        if s.granularity == "element":
            return (np.abs(moved).astype(np.float64) if moved is not None else np.zeros(len(d)),
                    np.abs(d).astype(np.float64))
        # Decided: where s is zero by construction consensus changes nothing.
        if moved is None:
            gap = np.zeros(len(self.segments))
        else:
            gap = taken.gap if s.consensus else norms(moved, self.segments)
        if s.penalty == "gap_rel":
            return gap, norms(d, self.segments)
        if s.penalty == "gap_ema":
            old = self.averages[k]
            self.averages[k] = np.where(old == 0, gap, 0.9 * old + 0.1 * gap)
            return gap, self.averages[k]
        # Decided: tau is the period, also where the first round is shorter.
        return gap, float(s.period) * taken.first.astype(np.float64)

    def ratios(self, k, taken, d, moved, event):
        """Lambda: one per segment, or per element."""
        s = self.settings
        elements = s.granularity == "element"
        count = len(d) if elements else len(self.segments)
        gap, unit = np.zeros(count), np.full(count, float(s.lambda_const))
        if s.penalty in GAPS:
            gap, unit = self.measured(k, taken, d, moved)
        eps = s.eps * np.sqrt(1.0 if elements else self.lengths.astype(np.float64))
        ratio = penalty(s.penalty, gap, unit, eps, s.lambda_max, s.floor)
        if k == 0:
            event.ratio, event.gap, event.unit = ratio, gap, unit
        return ratio

    def inverse(self, ratio, gamma):
        """inv_lambda of section 13: rounded once, per segment or per element."""
        with np.errstate(all="ignore"):
            inverse = (1.0 / (gamma * ratio if self.settings.lr_normalised else ratio)).astype(f32)
        if len(inverse) == 1 and len(self.segments) == 1:
            return inverse[0]
        return inverse if self.settings.granularity == "element" else np.repeat(inverse, self.lengths)

    def difference(self, k, taken, moved):
        """d of section 13 and the vector whose norm is the unit of gap_rel."""
        s = self.settings
        if s.payload == "params":
            base = taken.anchor if s.form == "delta" else self.anchors[k]
            d = base - taken.average
            return d, d
        dbar = taken.average
        return (dbar - moved if s.form == "anchor_diff" and moved is not None else dbar), dbar

    def update(self, taken, fresh, gamma, event):
        """OuterRule on every own state; afterwards s per own state, or None where nothing moved.

        taken: what is consumed. Decided: with freshness a round that all ranks skipped counts as t = 0 (13): the fresh
        terms have to come in, or their removal a round later would not meet them.
        """
        s = self.settings
        empty = taken is None or taken.average is None
        if empty and s.freshness == 0:
            return None
        if s.lr_normalised and not gamma >= GAMMA_MIN:
            raise InvalidState(f"lr: found {gamma}, allowed is at least {GAMMA_MIN} with lr_normalised")
        alpha = s.alpha * gamma if s.lr_normalised else s.alpha
        everything = []
        for k in range(len(self.anchors)):
            everything.append(self.update_own(k, None if empty else taken, fresh, gamma, alpha, event))
            self.gaps[k] = norms(everything[k], self.segments)
        return everything

    def update_own(self, k, taken, fresh, gamma, alpha, event):
        """Section 13 on one state. taken: None at t = 0 with freshness."""
        s = self.settings
        if s.rule == "none" and s.payload == "params":
            old, self.anchors[k] = self.anchors[k], taken.average.copy()
            return old - self.anchors[k]
        zeros, inv_lambda = np.zeros_like(self.anchors[k]), f32(1)
        d = prev = zeros
        if taken is not None:
            moved = None if taken.moved is None else taken.moved[k]
            d, measure = self.difference(k, taken, moved)
            inv_lambda = self.inverse(self.ratios(k, taken, measure, moved, event), gamma)
            prev = taken.own[k]
        in_gradients = s.clip_units == "grad" and s.clip in ("coord", "norm") and not s.lr_normalised
        phi = s.phi * gamma if in_gradients else s.phi
        correction = (s.freshness, fresh[k], prev) if s.freshness > 0 else None
        self.anchors[k], self.momenta[k], moved, share = apply(
            self.anchors[k], self.momenta[k], d, inv_lambda, alpha, s.beta, s.rule,
            lambda m: clip(m, s.clip, phi, self.tensors), correction)
        if k == 0:
            event.clipped = share
        return moved

    def merge(self, x, taken):
        """Merge of section 3 on every rank. Without a launch before (hold), x_L is the anchor."""
        s, out = self.settings, []
        for r in range(self.world):
            anchor = self.anchors[self.owner(r)]
            start = taken.starts[r] if taken is not None and taken.starts is not None else anchor
            out.append(merged(s.merge, s.merge_a, x[r], anchor, start))
        return out

    # Moments

    def boundary(self, x, gamma, event):
        """A step that launches, and consumes as well if the delay is 0 or the period. Returns live."""
        s, taken = self.settings, self.pending
        if s.delay == 0:
            self.launch(x, event)
            return self.consume(x, gamma, event)
        if not s.delayed:
            self.launch(x, event)
            return x
        first = taken is None and s.freshness == 0
        event.held, event.consumed = first, not first
        if s.snapshot_before_update:
            self.launch(x, event)
            self.pending.moved = self.update(taken, self.pending.own, gamma, event)
            return self.merge(x, taken)
        self.update(taken, None, gamma, event)
        x = self.merge(x, taken)
        self.launch(x, event)
        return x

    def consume(self, x, gamma, event):
        """CONSUME of a reduction whose launch is an earlier step, or this one with delay 0."""
        self.update(self.pending, None, gamma, event)
        x = self.merge(x, self.pending)
        self.pending = None
        event.consumed = True
        # Decided: reset drops what was done after the launch (3), the other merges keep it for a launch.
        if self.settings.merge == "reset":
            self.steps = 0
        return x

    def step(self, n, x, gamma):
        """Inner step n. Returns live and what happened, None: nothing."""
        s, event = self.settings, Event(self.index)
        self.inner_step(x)
        since = (n - self.offset) % s.period
        if since == 0:
            return self.boundary(x, gamma, event), event
        if since == s.delay and self.pending is not None:
            return self.consume(x, gamma, event), event
        return x, None

    def flush(self, x, gamma):
        """4.1, "flush": a short round if inner steps wait for a launch, then all that is pending; live = A.

        Decided: below a delay of one period the reduction in flight comes first, with its own merge; then the short
        round is launched and consumed at once.
        """
        s, events = self.settings, []
        if self.pending is not None and not s.delayed:
            events.append(Event(self.index))
            x = self.consume(x, gamma, events[-1])
        if self.steps:
            events.append(Event(self.index))
            if s.delayed:
                x = self.boundary(x, gamma, events[-1])
            else:
                self.launch(x, events[-1])
        if self.pending is not None:
            if not events or s.delayed:
                events.append(Event(self.index))
            self.update(self.pending, [np.zeros_like(v) for v in x], gamma, events[-1])
            events[-1].consumed = True
            self.pending = None
        if events:
            self.agree()
            x = [self.anchors[self.owner(r)].copy() for r in range(self.world)]
        self.steps, self.begins = 0, True
        return x, events

    def agree(self):
        """Section 5: after a flush with beta > 0 anchors and momenta are averaged once, in full precision."""
        if len(self.anchors) == 1 or self.settings.beta == 0 or self.settings.rule == "none":
            return
        for vectors in (self.anchors, self.momenta):
            mean = self.mean_of_ranks(vectors)
            vectors[:] = [mean.copy() for _ in vectors]


class Outer:
    """The engine of section 3 on all ranks. tensors: per rank a list of float32 arrays, equal on all ranks."""

    mean_of_ranks = staticmethod(mean_of_ranks)

    def __init__(self, settings, tensors, checked=True):
        self.settings, self.world = settings, len(tensors)
        if checked:
            settings.validate(self.world)
        for r, mine in enumerate(tensors):
            for i, tensor in enumerate(mine):
                if tensor.tobytes() != tensors[0][i].tobytes():
                    raise ValueError(f"MISMATCH: tensor {i} differs between rank 0 and rank {r}")
        count = len(tensors[0])
        # Decided: tensors of a fragment are in order of registration, whatever the order in the list.
        self.members = [sorted(f) for f in settings.fragments or [range(count)]]
        if sorted(i for f in self.members for i in f) != list(range(count)):
            raise ValueError(f"fragments: found {settings.fragments}, allowed is each of the {count} tensors once")
        self.fragments = []
        for index, members in enumerate(self.members):
            sizes = [tensors[0][i].size for i in members]
            self.fragments.append(Fragment(settings, index, sizes, self.world, self.vectors(tensors, members)[0]))
        self.total, self.gamma, self.swapped = 0, 1.0, None

    @staticmethod
    def vectors(live, members):
        """The tensors of a fragment as one vector per rank."""
        empty = np.zeros(0, f32)
        return [np.concatenate([empty, *(mine[i].ravel() for i in members)]) for mine in live]

    @staticmethod
    def put(live, members, vectors):
        for mine, vector in zip(live, vectors):
            at = 0
            for i in members:
                mine[i][...] = vector[at : at + mine[i].size].reshape(mine[i].shape)
                at += mine[i].size

    def step(self, live, gamma=1.0):
        """After every inner step. live: per rank a list of float32 arrays, changed in place. Returns events.

        Decided: a step that raises has changed nothing, the count of steps included.
        """
        if self.swapped is not None:
            raise InvalidState("step: the anchors are in the live tensors, swap them back")
        return self.attempt(lambda: self.advance(live, gamma))

    def attempt(self, work):
        """work() -> events and live values to write, which are written if nothing was raised."""
        s = self.settings
        before = self.export_state() if s.nonfinite == "error" or s.lr_normalised or s.codec is not None else None
        try:
            with np.errstate(all="ignore"):
                events, changed = work()
        except (NonFinite, InvalidState):
            if before is not None:
                self.import_state(before)
            raise
        for live, members, x in changed:
            self.put(live, members, x)
        return events

    def advance(self, live, gamma):
        self.total, self.gamma = self.total + 1, float(gamma)
        if self.total <= self.settings.early_steps:
            return [], self.synchronise(live)
        events, changed = [], []
        for fragment, members in zip(self.fragments, self.members):
            x, event = fragment.step(self.total - self.settings.early_steps, self.vectors(live, members), self.gamma)
            if event is not None:
                events.append(event)
                changed.append((live, members, x))
        return events, changed

    def synchronise(self, live):
        """Every-step phase (6, 9.4): mean of the parameters, or nothing where the gradients are averaged.

        Decided: a rank is skipped here if any of its tensors is not finite. Anchors follow the live values, so that
        swap and the switch need no case of their own.
        """
        changed = []
        whole = list(range(len(live[0])))
        x = self.vectors(live, whole)
        if self.settings.every_step == "params":
            bad = [not np.isfinite(v).all() for v in x]
            if any(bad) and self.settings.nonfinite == "error":
                raise NonFinite(f"ranks {[r for r, b in enumerate(bad) if b]}")
            skip = self.settings.nonfinite == "skip_rank"
            mean = self.mean_of_ranks([None if skip and bad[r] else x[r] for r in range(self.world)])
            if mean is not None:
                x = [mean] * self.world
                changed.append((live, whole, x))
        starts = np.cumsum([0, *(tensor.size for tensor in live[0])])
        for fragment, members in zip(self.fragments, self.members):
            fragment.reset(np.concatenate([np.zeros(0, f32), *(x[0][starts[i] : starts[i + 1]] for i in members)]))
        return changed

    def flush(self, live):
        """Delivers everything; live = A. Uses the last gamma. Returns events; without work it does nothing."""
        if self.swapped is not None:
            raise InvalidState("flush: the anchors are in the live tensors, swap them back")
        return self.attempt(lambda: self.deliver(live))

    def deliver(self, live):
        events, changed = [], []
        for fragment, members in zip(self.fragments, self.members):
            x, done = fragment.flush(self.vectors(live, members), self.gamma)
            if done:
                events += done
                changed.append((live, members, x))
        return events, changed

    def swap(self, live):
        """Anchors into live; again: back, bit for bit (9.5). What is pending is not touched."""
        if self.swapped is not None:
            for members, x in zip(self.members, self.swapped):
                self.put(live, members, x)
            self.swapped = None
            return
        self.swapped = [self.vectors(live, members) for members in self.members]
        for fragment, members in zip(self.fragments, self.members):
            self.put(live, members, [fragment.anchors[fragment.owner(r)] for r in range(self.world)])

    def anchor(self, rank=0):
        """The anchors of a rank, one array per tensor, flat."""
        out = {}
        for fragment, members in zip(self.fragments, self.members):
            for i, tensor in zip(members, fragment.tensors):
                out[i] = fragment.anchors[fragment.owner(rank)][tensor].copy()
        return [out[i] for i in sorted(out)]

    def export_state(self):
        """Everything but the live tensors, the pending reduction as its average (10, QUIESCE)."""
        values = [{key: value for key, value in f.__dict__.items() if key != "settings"} for f in self.fragments]
        return copy.deepcopy((self.total, self.gamma, self.swapped, values))

    def import_state(self, state):
        self.total, self.gamma, self.swapped, fragments = copy.deepcopy(state)
        for fragment, values in zip(self.fragments, fragments):
            fragment.__dict__.update(values)
