//! Collectives: what they do with which buffers, and how they start.

use std::sync::Arc;

use sotto_sys as sys;

use crate::buffers::{Kept, Source, Target, Views};
use crate::call::Call;
use crate::comm::{number, Comm};
use crate::error::{Error, Result};
use crate::left;
use crate::op::{Handle, Op};
use crate::text::counted;

/// The parts of one buffer: elements that belong to each rank, and where they begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Elements, one number per rank; 0 is allowed.
    pub counts: Vec<u64>,
    /// Where they begin, in elements; `None`: one behind the other, from 0.
    pub offsets: Option<Vec<u64>>,
}

impl From<Vec<u64>> for Parts {
    fn from(counts: Vec<u64>) -> Parts {
        Parts { counts, offsets: None }
    }
}

#[derive(Clone, Debug)]
enum Kind {
    Barrier,
    Broadcast { root: i32 },
    AllGather,
    AllGatherV { out: Vec<Parts> },
    ReduceScatter,
    ReduceScatterV { input: Vec<Parts> },
    Reduce { root: i32 },
    AllReduce,
    Gather { root: i32 },
    Scatter { root: i32 },
    AllToAll,
    AllToAllV { input: Vec<Parts>, out: Vec<Parts> },
    Send { peer: i32 },
    Recv { peer: i32 },
}

/// This rank's place in an operation.
#[derive(Clone, Copy)]
struct Place {
    rank: u32,
    size: u32,
    root: bool,
}

/// What an operation reads and writes. `None`: nothing, on this rank.
struct Sides {
    ins: Option<Views>,
    outs: Option<Views>,
}

/// A collective that has not been started: what [`Comm::start`] and [`Group::add`](crate::Group)
/// take. It owns its buffers.
#[must_use = "a collective does nothing until it is started"]
pub struct Collective<B> {
    buffers: B,
    sides: fn(&mut B, Place) -> Sides,
    kind: Kind,
}

fn nothing<B>(_: &mut B, _: Place) -> Sides {
    Sides { ins: None, outs: None }
}

fn views_of(buffers: &mut impl Target) -> Views {
    let mut views = Views::default();
    buffers.write(&mut views);
    views
}

fn in_place<T: Target>(both: &mut T, _: Place) -> Sides {
    let views = views_of(both);
    Sides { ins: Some(views.clone()), outs: Some(views) }
}

/// What is read is this rank's part of what is written.
fn in_is_part<T: Target>(out: &mut T, at: Place) -> Sides {
    let outs = views_of(out);
    Sides { ins: Some(outs.parts(at.rank, at.size)), outs: Some(outs) }
}

/// What is written is this rank's part of what is read.
fn out_is_part<T: Target>(input: &mut T, at: Place) -> Sides {
    let ins = views_of(input);
    Sides { outs: Some(ins.parts(at.rank, at.size)), ins: Some(ins) }
}

fn reads<S: Source>(input: &mut S, _: Place) -> Sides {
    let mut ins = Views::default();
    input.read(&mut ins);
    Sides { ins: Some(ins), outs: None }
}

fn writes<T: Target>(out: &mut T, _: Place) -> Sides {
    Sides { ins: None, outs: Some(views_of(out)) }
}

/// The root has the whole, of which its part is what it brings.
fn part_to_root<T: Target>(buffers: &mut T, at: Place) -> Sides {
    if at.root {
        in_is_part(buffers, at)
    } else {
        Sides { ins: Some(views_of(buffers)), outs: None }
    }
}

/// The root has the whole, of which its part is what it keeps.
fn part_from_root<T: Target>(buffers: &mut T, at: Place) -> Sides {
    if at.root {
        out_is_part(buffers, at)
    } else {
        writes(buffers, at)
    }
}

fn pair<S: Source, T: Target>((input, out): &mut (S, T), at: Place) -> Sides {
    Sides { ins: reads(input, at).ins, outs: Some(views_of(out)) }
}

fn to_root<S: Source, T: Target>((input, out): &mut (S, Option<T>), at: Place) -> Sides {
    Sides { ins: reads(input, at).ins, outs: out.as_mut().map(views_of) }
}

fn from_root<S: Source, T: Target>((input, out): &mut (Option<S>, T), at: Place) -> Sides {
    let ins = input.as_mut().and_then(|input| reads(input, at).ins);
    Sides { ins, outs: Some(views_of(out)) }
}

impl Collective<()> {
    /// Completes on a rank when every rank has called it.
    pub fn barrier() -> Self {
        Collective { buffers: (), sides: nothing::<()>, kind: Kind::Barrier }
    }
}

impl<T: Target> Collective<T> {
    /// Copies root's buffers over those of all ranks.
    pub fn broadcast(buffers: T, root: u32) -> Result<Self> {
        let kind = Kind::Broadcast { root: number("root", root)? };
        Ok(Collective { buffers, sides: in_place::<T>, kind })
    }

    /// The reduction over ranks, in place, with the same bits on all ranks.
    pub fn all_reduce(buffers: T) -> Self {
        Collective { buffers, sides: in_place::<T>, kind: Kind::AllReduce }
    }

    /// The concatenation over ranks, in place: this rank's part is what it brings.
    pub fn all_gather_in_place(buffers: T) -> Self {
        Collective { buffers, sides: in_is_part::<T>, kind: Kind::AllGather }
    }

    /// The reduction over ranks, in place: of the result this rank's part is written.
    pub fn reduce_scatter_in_place(buffers: T) -> Self {
        Collective { buffers, sides: out_is_part::<T>, kind: Kind::ReduceScatter }
    }

    /// Part r goes to rank r and is replaced by what comes from rank r.
    pub fn all_to_all_in_place(buffers: T) -> Self {
        Collective { buffers, sides: in_place::<T>, kind: Kind::AllToAll }
    }

    /// The reduction over ranks, in place, on the root.
    pub fn reduce_in_place(buffers: T, root: u32) -> Result<Self> {
        let kind = Kind::Reduce { root: number("root", root)? };
        Ok(Collective { buffers, sides: in_place::<T>, kind })
    }

    /// The concatenation over ranks, on the root: its buffers are the whole, and its part of them
    /// is what it brings. Elsewhere buffers are the rank's part, which is only read.
    pub fn gather_in_place(buffers: T, root: u32) -> Result<Self> {
        let kind = Kind::Gather { root: number("root", root)? };
        Ok(Collective { buffers, sides: part_to_root::<T>, kind })
    }

    /// Each rank's part of the root's buffers. On the root these are the whole, where its part is
    /// already; elsewhere buffers are the rank's part.
    pub fn scatter_in_place(buffers: T, root: u32) -> Result<Self> {
        let kind = Kind::Scatter { root: number("root", root)? };
        Ok(Collective { buffers, sides: part_from_root::<T>, kind })
    }

    /// Receives from a rank what it sends.
    pub fn recv(buffers: T, peer: u32) -> Result<Self> {
        let kind = Kind::Recv { peer: number("peer", peer)? };
        Ok(Collective { buffers, sides: writes::<T>, kind })
    }
}

impl<S: Source> Collective<S> {
    /// Sends to a rank, which receives as many elements of the same dtypes.
    pub fn send(buffers: S, peer: u32) -> Result<Self> {
        let kind = Kind::Send { peer: number("peer", peer)? };
        Ok(Collective { buffers, sides: reads::<S>, kind })
    }
}

impl<S: Source, T: Target> Collective<(S, T)> {
    fn of(input: S, out: T, kind: Kind) -> Self {
        Collective { buffers: (input, out), sides: pair::<S, T>, kind }
    }

    /// `out` = reduction of `input` over ranks.
    pub fn all_reduce_into(input: S, out: T) -> Self {
        Self::of(input, out, Kind::AllReduce)
    }

    /// `out` = concatenation of `input` over ranks.
    pub fn all_gather(input: S, out: T) -> Self {
        Self::of(input, out, Kind::AllGather)
    }

    /// `out` = the parts of all ranks, which may have different counts, the same on all ranks.
    /// `parts`: of each buffer of `out`.
    pub fn all_gather_v(input: S, out: T, parts: Vec<Parts>) -> Self {
        Self::of(input, out, Kind::AllGatherV { out: parts })
    }

    /// `out` = this rank's part of the reduction of `input` over ranks.
    pub fn reduce_scatter(input: S, out: T) -> Self {
        Self::of(input, out, Kind::ReduceScatter)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with parts that may have different counts, the
    /// same on all ranks. `parts`: of each buffer of `input`.
    pub fn reduce_scatter_v(input: S, out: T, parts: Vec<Parts>) -> Self {
        Self::of(input, out, Kind::ReduceScatterV { input: parts })
    }

    /// Part r of `input` goes to rank r, part r of `out` comes from rank r; equal parts.
    pub fn all_to_all(input: S, out: T) -> Self {
        Self::of(input, out, Kind::AllToAll)
    }

    /// As [`all_to_all`](Self::all_to_all), with parts of any counts, which have to fit in pairs.
    pub fn all_to_all_v(input: S, out: T, in_parts: Vec<Parts>, out_parts: Vec<Parts>) -> Self {
        Self::of(input, out, Kind::AllToAllV { input: in_parts, out: out_parts })
    }
}

impl<S: Source, T: Target> Collective<(S, Option<T>)> {
    /// `out` on the root = reduction of `input` over ranks; `None` elsewhere.
    pub fn reduce(input: S, out: Option<T>, root: u32) -> Result<Self> {
        let kind = Kind::Reduce { root: number("root", root)? };
        Ok(Collective { buffers: (input, out), sides: to_root::<S, T>, kind })
    }

    /// `out` on the root = concatenation of `input` over ranks; `None` elsewhere.
    pub fn gather(input: S, out: Option<T>, root: u32) -> Result<Self> {
        let kind = Kind::Gather { root: number("root", root)? };
        Ok(Collective { buffers: (input, out), sides: to_root::<S, T>, kind })
    }
}

impl<S: Source, T: Target> Collective<(Option<S>, T)> {
    /// `out` = this rank's part of `input` on the root; `None` elsewhere.
    pub fn scatter(input: Option<S>, out: T, root: u32) -> Result<Self> {
        let kind = Kind::Scatter { root: number("root", root)? };
        Ok(Collective { buffers: (input, out), sides: from_root::<S, T>, kind })
    }
}

impl<B: Send + 'static> Collective<B> {
    /// Calls the library. Returns the buffers, which are in use from now on if the call started
    /// something.
    ///
    /// # Safety
    /// The buffers are kept until the operation has completed. The comm is locked.
    pub(crate) unsafe fn launch(
        self,
        comm: &Comm,
        call: Call<'_>,
        out_op: *mut *mut sys::sotto_op,
    ) -> Result<Kept<B>> {
        let mut buffers = Kept::new(self.buffers);
        let rank = comm.rank();
        let root = self.kind.root().map_or(false, |root| root as u32 == rank);
        let sides = (self.sides)(buffers.get_mut(), Place { rank, size: comm.size(), root });
        let n = sides.count()?;
        let parts = CParts::new(comm.size(), n, &self.kind)?;
        let (ins, outs) = (pointer(&sides.ins), pointer(&sides.outs));
        call.with(comm.api(), |call| self.kind.call(comm, ins, outs, n, &parts, call, out_op))?;
        Ok(buffers)
    }
}

fn pointer(views: &Option<Views>) -> *const sys::sotto_buffer {
    views.as_ref().map_or(std::ptr::null(), |views| views.0.as_ptr())
}

impl Sides {
    /// The library takes one number for both sides.
    fn count(&self) -> Result<u64> {
        let (ins, outs) = (self.ins.as_ref(), self.outs.as_ref());
        let (a, b) = (ins.map(|views| views.0.len()), outs.map(|views| views.0.len()));
        match (a, b) {
            (Some(a), Some(b)) if a != b => Err(Error::argument(format!(
                "input has {} and output {b}; they have to be as many",
                counted(a, "buffer")
            ))),
            _ => Ok(a.or(b).unwrap_or(0) as u64),
        }
    }
}

/// Parts as structs of C; empty where there are none.
struct CParts(Vec<sys::sotto_parts>);

impl CParts {
    fn new(size: u32, n: u64, kind: &Kind) -> Result<CParts> {
        let (input, out): (Option<&[Parts]>, Option<&[Parts]>) = match kind {
            Kind::AllGatherV { out } => (None, Some(out)),
            Kind::ReduceScatterV { input } => (Some(input), None),
            Kind::AllToAllV { input, out } => (Some(input), Some(out)),
            _ => return Ok(CParts(Vec::new())),
        };
        let mut structs = vec![sys::sotto_parts::default(); n as usize];
        for (what, parts) in [("input", input), ("output", out)] {
            let parts = match parts {
                Some(parts) => parts,
                None => continue,
            };
            if parts.len() as u64 != n {
                return Err(Error::argument(format!(
                    "there are parts of {}, and {}; give parts for each",
                    counted(parts.len(), &format!("{what} buffer")),
                    counted(n as usize, "buffer")
                )));
            }
            for (c, of_buffer) in structs.iter_mut().zip(parts) {
                of_buffer.check(what, size)?;
                let offsets = of_buffer.offsets.as_ref();
                let offsets = offsets.map_or(std::ptr::null(), |offsets| offsets.as_ptr());
                if what == "input" {
                    (c.in_counts, c.in_offsets) = (of_buffer.counts.as_ptr(), offsets);
                } else {
                    (c.out_counts, c.out_offsets) = (of_buffer.counts.as_ptr(), offsets);
                }
            }
        }
        Ok(CParts(structs))
    }
}

impl Parts {
    /// The library reads one number per rank.
    fn check(&self, what: &str, size: u32) -> Result<()> {
        let lengths = [Some(self.counts.len()), self.offsets.as_ref().map(Vec::len)];
        for (which, length) in ["counts", "offsets"].iter().zip(lengths) {
            if length.map_or(false, |length| length != size as usize) {
                return Err(Error::argument(format!(
                    "{which} of the {what}'s parts has {} numbers; allowed: {size}, one per rank",
                    length.unwrap_or(0)
                )));
            }
        }
        Ok(())
    }
}

impl Kind {
    fn root(&self) -> Option<i32> {
        match *self {
            Kind::Broadcast { root }
            | Kind::Reduce { root }
            | Kind::Gather { root }
            | Kind::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// # Safety
    /// As [`Collective::launch`]; `ins` and `outs` lead to `n` views where the kind has them.
    #[allow(clippy::too_many_arguments)] // those of C
    unsafe fn call(
        &self,
        comm: &Comm,
        ins: *const sys::sotto_buffer,
        outs: *const sys::sotto_buffer,
        n: u64,
        parts: &CParts,
        call: *const sys::sotto_call,
        op: *mut *mut sys::sotto_op,
    ) -> i32 {
        let (api, raw, parts) = (comm.api(), comm.raw(), parts.0.as_ptr());
        match *self {
            Kind::Barrier => (api.sotto_barrier)(raw, call, op),
            Kind::Broadcast { root } => (api.sotto_broadcast)(raw, ins, outs, n, root, call, op),
            Kind::AllGather => (api.sotto_all_gather)(raw, ins, outs, n, call, op),
            Kind::AllGatherV { .. } => (api.sotto_all_gather_v)(raw, ins, outs, n, parts, call, op),
            Kind::ReduceScatter => (api.sotto_reduce_scatter)(raw, ins, outs, n, call, op),
            Kind::ReduceScatterV { .. } => {
                (api.sotto_reduce_scatter_v)(raw, ins, outs, n, parts, call, op)
            }
            Kind::Reduce { root } => (api.sotto_reduce)(raw, ins, outs, n, root, call, op),
            Kind::AllReduce => (api.sotto_all_reduce)(raw, ins, outs, n, call, op),
            Kind::Gather { root } => (api.sotto_gather)(raw, ins, outs, n, root, call, op),
            Kind::Scatter { root } => (api.sotto_scatter)(raw, ins, outs, n, root, call, op),
            Kind::AllToAll => (api.sotto_all_to_all)(raw, ins, outs, n, std::ptr::null(), call, op),
            Kind::AllToAllV { .. } => (api.sotto_all_to_all)(raw, ins, outs, n, parts, call, op),
            Kind::Send { peer } => (api.sotto_send)(raw, ins, n, peer, call, op),
            Kind::Recv { peer } => (api.sotto_recv)(raw, outs, n, peer, call, op),
        }
    }
}

impl Comm {
    /// Starts a collective. Errors: `InvalidArgument` (buffers, counts, root, peer), `Unsupported`
    /// (dtype, device), `Busy` ([`Call::no_block`]; a codec in use), `InvalidState` (fork,
    /// callback), the comm's own if it has failed. The buffers are dropped on error.
    pub fn start<'a, B: Send + 'static>(
        &self,
        collective: Collective<B>,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<B>> {
        left::reap();
        let mut op = std::ptr::null_mut();
        let _one = self.shared.locked()?;
        let buffers = unsafe { collective.launch(self, call.into(), &mut op) }?;
        Ok(Op::new(Handle::new(self.api(), op), buffers, Arc::clone(&self.shared)))
    }
}
