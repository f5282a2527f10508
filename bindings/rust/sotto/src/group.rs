//! The collectives by their names, and groups of them.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::buffers::{Kept, Source, Target};
use crate::call::Call;
use crate::collective::{Collective, Parts};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::left;
use crate::library::check;
use crate::op::{Handle, Op};

/// Errors are those of [`Comm::start`]; what each does is told at [`Collective`].
impl Comm {
    /// Completes on a rank when every rank has called it.
    pub fn barrier<'a>(&self, call: impl Into<Call<'a>>) -> Result<Op<()>> {
        self.start(Collective::barrier(), call)
    }

    /// Copies root's buffers over those of all ranks.
    pub fn broadcast<'a, T: Target>(
        &self,
        buffers: T,
        root: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<T>> {
        self.start(Collective::broadcast(buffers, root)?, call)
    }

    /// The reduction over ranks, in place; the sum unless `call` says otherwise.
    pub fn all_reduce<'a, T: Target>(
        &self,
        buffers: T,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<T>> {
        self.start(Collective::all_reduce(buffers), call)
    }

    /// `out` = reduction of `input` over ranks.
    pub fn all_reduce_into<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::all_reduce_into(input, out), call)
    }

    /// `out` = concatenation of `input` over ranks: `size` times as many elements.
    pub fn all_gather<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::all_gather(input, out), call)
    }

    /// `out` = the parts of all ranks, which may have different counts.
    pub fn all_gather_v<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        parts: Vec<Parts>,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::all_gather_v(input, out, parts), call)
    }

    /// `out` = this rank's part of the reduction of `input`, which has `size` times as many
    /// elements.
    pub fn reduce_scatter<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::reduce_scatter(input, out), call)
    }

    /// `out` = this rank's part of the reduction of `input`; parts may have different counts.
    pub fn reduce_scatter_v<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        parts: Vec<Parts>,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::reduce_scatter_v(input, out, parts), call)
    }

    /// `out` on the root = reduction of `input` over ranks; `None` elsewhere.
    pub fn reduce<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: Option<T>,
        root: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, Option<T>)>> {
        self.start(Collective::reduce(input, out, root)?, call)
    }

    /// `out` on the root = concatenation of `input` over ranks; `None` elsewhere.
    pub fn gather<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: Option<T>,
        root: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, Option<T>)>> {
        self.start(Collective::gather(input, out, root)?, call)
    }

    /// `out` = this rank's part of `input` on the root; `None` elsewhere.
    pub fn scatter<'a, S: Source, T: Target>(
        &self,
        input: Option<S>,
        out: T,
        root: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(Option<S>, T)>> {
        self.start(Collective::scatter(input, out, root)?, call)
    }

    /// Part r of `input` goes to rank r, part r of `out` comes from rank r.
    pub fn all_to_all<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::all_to_all(input, out), call)
    }

    /// As [`all_to_all`](Comm::all_to_all), with parts of any counts.
    pub fn all_to_all_v<'a, S: Source, T: Target>(
        &self,
        input: S,
        out: T,
        in_parts: Vec<Parts>,
        out_parts: Vec<Parts>,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<(S, T)>> {
        self.start(Collective::all_to_all_v(input, out, in_parts, out_parts), call)
    }

    /// Sends to a rank, which receives as many elements of the same dtypes.
    pub fn send<'a, S: Source>(
        &self,
        buffers: S,
        peer: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<S>> {
        self.start(Collective::send(buffers, peer)?, call)
    }

    /// Receives from a rank what it sends.
    pub fn recv<'a, T: Target>(
        &self,
        buffers: T,
        peer: u32,
        call: impl Into<Call<'a>>,
    ) -> Result<Op<T>> {
        self.start(Collective::recv(buffers, peer)?, call)
    }

    /// A group: collectives that are added to it start together, as one operation. Needed where
    /// sends and receives of one rank depend on each other.
    pub fn group(&self) -> Group<'_> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Group { comm: self, number, calls: Vec::new() }
    }
}

/// `Kept` buffers of some type.
type AnyKept = Box<dyn Any + Send>;

/// Makes a call and returns its buffers, which are in use then.
type Added<'c> = Box<dyn FnOnce(&Comm) -> Result<AnyKept> + 'c>;

/// Collectives that start together. Dropped without [`start`](Group::start) it starts nothing.
#[must_use = "a group starts nothing until start() is called"]
pub struct Group<'c> {
    comm: &'c Comm,
    number: u64,
    calls: Vec<Added<'c>>,
}

/// While the library collects calls. Dropped, it makes the library start nothing of them.
struct Collecting<'c>(&'c Comm);

impl Collecting<'_> {
    fn begin(comm: &Comm) -> Result<Collecting<'_>> {
        check(comm.api(), unsafe { (comm.api().sotto_group_begin)(comm.raw()) })?;
        Ok(Collecting(comm))
    }

    fn end(self, call: Call<'_>) -> Result<Handle> {
        let (comm, mut op) = (self.0, std::ptr::null_mut());
        std::mem::forget(self); // the library closes the group in any case
        let end = comm.api().sotto_group_end;
        call.with(comm.api(), |call| unsafe { end(comm.raw(), call, &mut op) })?;
        Ok(Handle::new(comm.api(), op))
    }
}

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        // A collected call that is refused makes the library start nothing when the group ends.
        let (api, raw) = (self.0.api(), self.0.raw());
        let (none, call, op) = (std::ptr::null(), std::ptr::null(), std::ptr::null_mut());
        unsafe {
            (api.sotto_send)(raw, none, 0, -1, call, op);
            (api.sotto_group_end)(raw, call, op);
        }
    }
}

/// Stands for the buffers of one collective of a group: [`Collected::take`] gives them back.
#[derive(Debug)]
pub struct Ticket<B> {
    group: u64,
    index: usize,
    _buffers: PhantomData<fn() -> B>,
}

/// The buffers of a group.
pub struct Collected {
    group: u64,
    kept: Vec<Option<AnyKept>>,
}

impl Collected {
    /// The buffers of one collective; `None`: the ticket is another group's.
    pub fn take<B: Send + 'static>(&mut self, ticket: Ticket<B>) -> Option<B> {
        if ticket.group != self.group {
            return None;
        }
        let kept = self.kept.get_mut(ticket.index)?.take()?;
        kept.downcast::<Kept<B>>().ok().map(|buffers| buffers.into_inner())
    }
}

impl<'c> Group<'c> {
    /// Adds a collective; of `call` tag and reduction alone may be set. Until the group starts the
    /// library knows nothing of it.
    pub fn add<B: Send + 'static>(
        &mut self,
        collective: Collective<B>,
        call: impl Into<Call<'c>>,
    ) -> Ticket<B> {
        let call = call.into();
        let nobody = std::ptr::null_mut();
        self.calls.push(Box::new(move |comm| {
            let buffers = unsafe { collective.launch(comm, call, nobody) }?;
            Ok(Box::new(buffers))
        }));
        Ticket { group: self.number, index: self.calls.len() - 1, _buffers: PhantomData }
    }

    /// Starts what was added. Of `call` time limit, priority, stream and `on_done` may be set.
    /// Errors: as [`Comm::start`], of the first that was refused, with its number from 0; then
    /// nothing is started.
    pub fn start<'a>(self, call: impl Into<Call<'a>>) -> Result<Op<Collected>> {
        left::reap();
        let (comm, call) = (self.comm, call.into());
        let mut kept = Vec::new(); // dropped behind what uses it
        let _one = comm.shared.locked()?;
        let collecting = Collecting::begin(comm)?;
        for (index, launch) in self.calls.into_iter().enumerate() {
            kept.push(Some(launch(comm).map_err(|error| {
                Error::new(error.status, format!("collective {index} of the group: {}", error.text))
            })?));
        }
        let handle = collecting.end(call)?;
        let kept = Collected { group: self.number, kept };
        Ok(Op::new(handle, Kept::new(kept), Arc::clone(&comm.shared)))
    }
}

impl std::fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({} collectives)", self.calls.len())
    }
}
