//! The collectives by their names, and groups of them.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::buffers::{Kept, Source, Target};
use crate::call::Call;
use crate::collective::{Collective, Parts};
use crate::comm::{Comm, One};
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

    /// Opens a group: collectives that are added to it start together, as one operation. Needed
    /// where sends and receives of one rank depend on each other. Other calls on this comm wait
    /// until the group is started or dropped; on the thread that has the group they are
    /// `InvalidState`. Errors: `InvalidState` (fork, callback).
    pub fn group(&self) -> Result<Group<'_>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        left::reap();
        let one = self.shared.locked()?;
        check(self.api(), unsafe { (self.api().sotto_group_begin)(self.raw()) })?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Ok(Group { comm: self, number, kept: Vec::new(), failed: None, open: true, _one: one })
    }
}

/// Collectives that start together. Dropped without [`start`](Group::start) it starts nothing.
#[must_use = "a group starts nothing until start() is called"]
pub struct Group<'c> {
    comm: &'c Comm,
    number: u64,
    kept: Vec<Option<Box<dyn Any + Send>>>,
    failed: Option<Error>,
    open: bool,
    _one: One<'c>,
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
    kept: Vec<Option<Box<dyn Any + Send>>>,
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

impl Group<'_> {
    /// Adds a collective; of `call` tag and reduction alone may be set. Errors: as [`Comm::start`];
    /// then nothing of the group can be started.
    pub fn add<'a, B: Send + 'static>(
        &mut self,
        collective: Collective<B>,
        call: impl Into<Call<'a>>,
    ) -> Result<Ticket<B>> {
        let nobody = std::ptr::null_mut();
        let launched = unsafe { collective.launch(self.comm, call.into(), nobody) };
        let buffers = launched.map_err(|error| {
            self.failed.get_or_insert_with(|| error.clone());
            error
        })?;
        self.kept.push(Some(Box::new(buffers)));
        Ok(Ticket { group: self.number, index: self.kept.len() - 1, _buffers: PhantomData })
    }

    /// Starts what was added. Of `call` time limit, priority, stream and `on_done` may be set.
    /// Errors: that of a collective that was refused, or as [`Comm::start`].
    pub fn start<'a>(mut self, call: impl Into<Call<'a>>) -> Result<Op<Collected>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let (comm, mut op) = (self.comm, std::ptr::null_mut());
        self.open = false;
        let end = comm.api().sotto_group_end;
        call.into().with(comm.api(), |call| unsafe { end(comm.raw(), call, &mut op) })?;
        let kept = Collected { group: self.number, kept: std::mem::take(&mut self.kept) };
        Ok(Op::new(Handle::new(comm.api(), op), Kept::new(kept), Arc::clone(&comm.shared)))
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open {
            // A collected call that is refused makes the library start nothing when the group ends.
            let (api, raw) = (self.comm.api(), self.comm.raw());
            let (none, call, op) = (std::ptr::null(), std::ptr::null(), std::ptr::null_mut());
            unsafe {
                (api.sotto_send)(raw, none, 0, -1, call, op);
                (api.sotto_group_end)(raw, call, op);
            }
        }
    }
}
