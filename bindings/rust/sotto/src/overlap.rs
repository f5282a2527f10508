//! Gradients that are averaged as they become ready, while others are still being computed.

use std::sync::{Arc, Mutex, MutexGuard};

use sotto_sys as sys;

use crate::call::Call;
use crate::codec::StateMode;
use crate::comm::{Comm, Shared};
use crate::element::{Dtype, Element};
use crate::error::{Error, Result, Status};
use crate::library::{self, address, c_text, check};
use crate::op::{waits, Flight, Handle};
use crate::owner::Owner;
use crate::registered::Registered;
use crate::tensor::Tensor;

/// One gradient of an [`Overlap`].
pub enum Gradient {
    /// Memory that is the same in every round.
    Fixed(Tensor),
    /// Memory that lies elsewhere in every round: [`Round::ready_at`] gives it.
    Moving {
        /// Elements.
        count: usize,
        /// float32, float16 or bfloat16.
        dtype: Dtype,
    },
}

impl<T: Into<Tensor>> From<T> for Gradient {
    fn from(memory: T) -> Gradient {
        Gradient::Fixed(memory.into())
    }
}

/// Where a gradient is, if no round says otherwise.
enum Home {
    Fixed,
    Moving(usize, Dtype),
    /// An optimizer's memory, which is out of reach while a round is open.
    Optimizer(Tensor),
}

/// The memory of one gradient.
pub(crate) struct Slot {
    tensor: Tensor,
    home: Home,
    given: bool,  // `tensor` is what a round was given, not home
    marked: bool, // in this round: the library's until the round has ended
}

impl Slot {
    fn new(gradient: Gradient) -> Mutex<Slot> {
        let (tensor, home) = match gradient {
            Gradient::Fixed(tensor) => (tensor, Home::Fixed),
            Gradient::Moving { count, dtype } => {
                (Tensor::nowhere(count, dtype), Home::Moving(count, dtype))
            }
        };
        Mutex::new(Slot { tensor, home, given: false, marked: false })
    }

    pub(crate) fn of_optimizer(memory: &Tensor) -> Mutex<Slot> {
        let home = Home::Optimizer(memory.alias());
        Mutex::new(Slot { tensor: memory.alias(), home, given: false, marked: false })
    }

    /// Takes the memory that a round was given.
    pub(crate) fn take(&mut self, index: usize) -> Result<Tensor> {
        if !self.given {
            return Err(Error::argument(format!(
                "gradient {index} was given no memory by a round"
            )));
        }
        self.given = false;
        let home = match &self.home {
            Home::Moving(count, dtype) => Tensor::nowhere(*count, *dtype),
            Home::Fixed => return Err(fixed(index)),
            Home::Optimizer(memory) => memory.alias(),
        };
        Ok(std::mem::replace(&mut self.tensor, home))
    }
}

/// An overlap whose rounds are steps of an optimizer.
pub(crate) struct Rounds {
    pub(crate) owner: Owner<sys::sotto_overlap>,
    pub(crate) slots: Vec<Mutex<Slot>>,
}

pub(crate) fn inside(slot: &mut Mutex<Slot>) -> &mut Slot {
    slot.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Hot figures of an overlap. Times are those of the last round that ended well; -1: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlapInfo {
    /// Number of buckets.
    pub buckets: u32,
    /// Rounds that ended well.
    pub rounds: u64,
    /// How often order or buckets have changed.
    pub layout: u64,
    /// From the begin to the last gradient.
    pub begin_to_last_ready_ns: i64,
    /// From the first bucket that was complete to the end.
    pub network_ns: i64,
    /// From [`Round::finish`] to the end.
    pub exposed_ns: i64,
    /// What this rank sends in a round.
    pub payload_bytes_per_round: u64,
    /// Headers of it.
    pub header_bytes_per_round: u64,
    /// Memory held.
    pub state_bytes: u64,
    /// Gradients of the open round that are not marked; 0: none, or no round.
    pub missing: u32,
    /// Sent before the last bucket's gradients are there.
    pub early_payload_bytes_per_round: u64,
}

type Inner = Registered<sys::sotto_overlap, Vec<Mutex<Slot>>>;

/// Averages gradients whose memory it owns, each as soon as it is ready, in rounds.
///
/// ```no_run
/// # fn main() -> sotto::Result<()> {
/// let comm = sotto::init()?;
/// let gradients = vec![vec![0.0f32; 1000].into(), vec![0.0f32; 10].into()];
/// let mut overlap = sotto::Overlap::new(&comm, "{}", gradients)?;
/// let mut round = overlap.begin(())?;
/// for index in [1, 0] {
///     round.ready_with::<f32>(index, |gradient| gradient.fill(1.0))?; // computed here
/// }
/// round.finish()?;
/// round.wait()?;
/// let mean = overlap.gradient_mut::<f32>(0)?;
/// # let _ = mean;
/// # Ok(())
/// # }
/// ```
pub struct Overlap {
    inner: Inner,
}

impl Overlap {
    /// Creates an overlap. Collective. `json`: the keys of `sotto_overlap_create`, "{}" for
    /// defaults. Errors: `InvalidArgument` (names the key or the gradient), `Unsupported`,
    /// `Protocol`, the comm's own.
    pub fn new(comm: &Comm, json: &str, gradients: Vec<Gradient>) -> Result<Overlap> {
        let (api, json) = (comm.api(), c_text("json", json)?);
        let mut slots: Vec<_> = gradients.into_iter().map(Slot::new).collect();
        let like: Vec<_> = slots.iter_mut().map(|slot| inside(slot).tensor.view()).collect();
        let owner = {
            let _one = comm.shared.locked()?;
            Owner::make(api, api.sotto_overlap_destroy, |out| unsafe {
                let n = like.len() as u64;
                (api.sotto_overlap_create)(comm.raw(), json.as_ptr(), like.as_ptr(), n, out)
            })?
        };
        Ok(Overlap { inner: Registered::new(owner, slots, comm) })
    }

    fn slot(&mut self, index: usize) -> Result<&mut Slot> {
        let slots = self.inner.memory_mut()?;
        let n = slots.len();
        slots.get_mut(index).map(inside).ok_or_else(|| out_of_range(index, n))
    }

    /// A gradient, between rounds: to be filled before one, or averaged after it. Errors: `Busy` (a
    /// round is open or in flight), `InvalidArgument` (index, type; in device memory).
    pub fn gradient_mut<T: Element>(&mut self, index: usize) -> Result<&mut [T]> {
        self.slot(index)?.tensor.as_mut_slice()
    }

    /// Takes the memory back that [`Round::ready_at`] has given. Errors: as
    /// [`gradient_mut`](Overlap::gradient_mut); `InvalidArgument` (the gradient is not a moving
    /// one).
    pub fn take(&mut self, index: usize) -> Result<Tensor> {
        self.slot(index)?.take(index)
    }

    /// Opens a round. Collective. Errors: `Busy` (a round is open or in flight), the comm's own; of
    /// the round also `Cancelled` (a rank has withdrawn) and `Nonfinite` (codec).
    pub fn begin<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Round<'_>> {
        let handle = {
            let step = self.inner.start(call, |parts, call, op| unsafe {
                (parts.owner.api.sotto_overlap_begin)(parts.owner.raw(), call, op)
            })?;
            step.handle().clone()
        };
        // None of the gradients is the library's yet.
        self.inner.parts_mut().memory.iter_mut().for_each(|slot| inside(slot).marked = false);
        let parts = self.inner.parts();
        Ok(Round::new(&parts.owner, &parts.memory, &parts.comm, handle))
    }

    /// Hot figures.
    pub fn info(&self) -> Result<OverlapInfo> {
        let parts = self.inner.parts();
        info(&parts.owner, &parts.comm)
    }

    /// Report as JSON. `kind`: "all", "buckets", "order". Errors: `InvalidArgument` (kind).
    pub fn report(&self, kind: &str) -> Result<String> {
        let parts = self.inner.parts();
        report(&parts.owner, &parts.comm, kind)
    }

    /// The error feedback of a codec, between rounds: `Exact`, `Reset` or, collective, `Mean`.
    /// Errors: `InvalidState` (no codec), `Busy`, the comm's own.
    pub fn export_state(&mut self, mode: StateMode) -> Result<Vec<u8>> {
        let api = self.inner.api();
        let _one = self.inner.parts().comm.locked()?;
        library::export(api, |buf, cap, len| unsafe {
            (api.sotto_overlap_state_export)(self.inner.raw(), mode.code(), buf, cap, len)
        })
    }

    /// Error feedback becomes that of an export in the same mode. Errors: `InvalidArgument`
    /// (damaged; of other gradients, settings, ranks), `InvalidState` (no codec), `Busy`.
    pub fn import_state(&mut self, mode: StateMode, state: &[u8]) -> Result<()> {
        self.inner.call(|api, raw| unsafe {
            let n = state.len() as u64;
            (api.sotto_overlap_state_import)(raw, mode.code(), address(state), n)
        })
    }

    /// Withdraws from an open round, waits for it, at most its deadline, and destroys the overlap.
    /// Errors: `InvalidState` (inside a callback: it is destroyed later).
    pub fn close(mut self) -> Result<()> {
        self.withdraw_if_open();
        self.inner.close()
    }

    fn withdraw_if_open(&self) {
        withdraw_if_open(&self.inner.parts().owner, self.inner.in_flight());
    }
}

/// A round that was forgotten while it was open would never end.
pub(crate) fn withdraw_if_open(owner: &Owner<sys::sotto_overlap>, in_flight: bool) {
    if in_flight && !crate::callback::inside() {
        let reason = b"the overlap was dropped\0".as_ptr();
        unsafe { (owner.api.sotto_overlap_withdraw)(owner.raw(), reason.cast()) };
    }
}

impl Drop for Overlap {
    fn drop(&mut self) {
        self.withdraw_if_open();
    }
}

impl std::fmt::Debug for Overlap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Overlap")
    }
}

pub(crate) fn out_of_range(index: usize, n: usize) -> Error {
    Error::argument(format!("gradient {index} of {n}; allowed: 0 to {}", n as i64 - 1))
}

fn fixed(index: usize) -> Error {
    Error::argument(format!("gradient {index} has memory of its own for every round"))
}

pub(crate) fn info(owner: &Owner<sys::sotto_overlap>, comm: &Shared) -> Result<OverlapInfo> {
    let (api, mut out) = (owner.api, sys::sotto_overlap_info::default());
    let _one = comm.locked()?;
    check(api, unsafe { (api.sotto_overlap_get_info)(owner.raw(), &mut out) })?;
    Ok(OverlapInfo {
        buckets: out.buckets,
        rounds: out.rounds,
        layout: out.layout,
        begin_to_last_ready_ns: out.begin_to_last_ready_ns,
        network_ns: out.network_ns,
        exposed_ns: out.exposed_ns,
        payload_bytes_per_round: out.payload_bytes_per_round,
        header_bytes_per_round: out.header_bytes_per_round,
        state_bytes: out.state_bytes,
        missing: out.missing,
        early_payload_bytes_per_round: out.early_payload_bytes_per_round,
    })
}

pub(crate) fn report(
    owner: &Owner<sys::sotto_overlap>,
    comm: &Shared,
    kind: &str,
) -> Result<String> {
    let (api, kind) = (owner.api, c_text("kind", kind)?);
    let _one = comm.locked()?;
    library::report(api, |buf, cap, len| unsafe {
        (api.sotto_overlap_report)(owner.raw(), kind.as_ptr(), buf, cap, len)
    })
}

/// A round of an [`Overlap`], to which several threads may report gradients. Dropped while it is
/// open, this rank withdraws: the round ends with `Cancelled` on every rank.
#[must_use = "a round is open until it is finished, and in flight until it is waited for"]
pub struct Round<'o> {
    owner: &'o Owner<sys::sotto_overlap>,
    slots: &'o [Mutex<Slot>],
    comm: &'o Shared,
    flight: Flight,
    open: bool,
}

impl<'o> Round<'o> {
    pub(crate) fn new(
        owner: &'o Owner<sys::sotto_overlap>,
        slots: &'o [Mutex<Slot>],
        comm: &'o Shared,
        handle: Arc<Handle>,
    ) -> Round<'o> {
        Round { owner, slots, comm, flight: Flight::new(handle), open: true }
    }

    waits!();

    /// The memory of a gradient that is not the library's yet.
    fn claim(&self, index: usize) -> Result<MutexGuard<'_, Slot>> {
        let state = |text: String| Error::new(Status::InvalidState, text);
        if !self.open {
            return Err(state("the round is not open any more".into()));
        }
        let slots = self.slots;
        let slot = slots.get(index).ok_or_else(|| out_of_range(index, slots.len()))?;
        let slot = match slot.try_lock() {
            Ok(slot) => slot,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => {
                return Err(state(format!("gradient {index} is being marked by another call")))
            }
        };
        if slot.marked {
            return Err(state(format!("gradient {index} was marked before in this round")));
        }
        Ok(slot)
    }

    /// Calls the library for gradients and marks them: they are its own until the round has ended.
    fn mark(&self, indices: &[usize], call: impl FnOnce(*const u64, u64) -> i32) -> Result<()> {
        let slots = indices.iter().map(|&index| self.claim(index)).collect::<Result<Vec<_>>>()?;
        let numbers: Vec<u64> = indices.iter().map(|&index| index as u64).collect();
        check(self.owner.api, call(numbers.as_ptr(), numbers.len() as u64))?;
        slots.into_iter().for_each(|mut slot| slot.marked = true);
        Ok(())
    }

    /// Gradients are final, as they were filled before the round
    /// ([`Overlap::gradient_mut`]). Any thread. Errors: `InvalidArgument` (index), `InvalidState`
    /// (marked before; the round is not open), or what the round has ended with.
    pub fn ready(&self, indices: &[usize]) -> Result<()> {
        let (api, raw) = (self.owner.api, self.owner.raw());
        self.mark(indices, |numbers, n| unsafe {
            let (places, stream) = (std::ptr::null(), std::ptr::null_mut());
            (api.sotto_overlap_ready)(raw, numbers, places, n, stream)
        })
    }

    /// As [`ready`](Round::ready), of gradients in device memory that are final behind what is
    /// queued on a stream.
    ///
    /// # Safety
    /// `stream` is a `cudaStream_t` of the gradients' device, or NULL: its default stream.
    pub unsafe fn ready_on(&self, indices: &[usize], stream: *mut std::ffi::c_void) -> Result<()> {
        let (api, raw) = (self.owner.api, self.owner.raw());
        self.mark(indices, |numbers, n| {
            (api.sotto_overlap_ready)(raw, numbers, std::ptr::null(), n, stream)
        })
    }

    /// Fills a gradient, which is final then. Any thread. Errors: as [`ready`](Round::ready);
    /// `InvalidArgument` (type).
    pub fn ready_with<T: Element>(&self, index: usize, fill: impl FnOnce(&mut [T])) -> Result<()> {
        let mut slot = self.claim(index)?;
        fill(slot.tensor.as_mut_slice()?);
        let (api, raw) = (self.owner.api, self.owner.raw());
        check(api, unsafe {
            let (places, stream) = (std::ptr::null(), std::ptr::null_mut());
            (api.sotto_overlap_ready)(raw, &(index as u64), places, 1, stream)
        })?;
        slot.marked = true;
        Ok(())
    }

    /// A moving gradient is final and in this memory, which [`Overlap::take`] gives back after the
    /// round. Any thread. Errors: as [`ready`](Round::ready); `InvalidArgument` (another type or
    /// count; the gradient is not a moving one). The memory is dropped on error.
    pub fn ready_at(&self, index: usize, memory: impl Into<Tensor>) -> Result<()> {
        let mut slot = self.claim(index)?;
        if matches!(slot.home, Home::Fixed) {
            return Err(fixed(index));
        }
        let memory = memory.into();
        let (api, raw, place) = (self.owner.api, self.owner.raw(), memory.view());
        check(api, unsafe {
            let stream = std::ptr::null_mut();
            (api.sotto_overlap_ready)(raw, &(index as u64), &place, 1, stream)
        })?;
        slot.tensor = memory;
        slot.given = true;
        slot.marked = true;
        Ok(())
    }

    /// Gradients that this rank does not have in this round: they count as zero. Any thread.
    /// Errors: as [`ready`](Round::ready).
    pub fn unused(&self, indices: &[usize]) -> Result<()> {
        let (api, raw) = (self.owner.api, self.owner.raw());
        self.mark(indices, |numbers, n| unsafe { (api.sotto_overlap_unused)(raw, numbers, n) })
    }

    /// Nothing more comes in this round. Errors: `InvalidState` (names what is missing, unless
    /// "unused" is "zero"; the round stays open), or what the round has ended with.
    pub fn finish(&mut self) -> Result<()> {
        let (api, raw) = (self.owner.api, self.owner.raw());
        check(api, unsafe { (api.sotto_overlap_finish)(raw) })?;
        self.open = false;
        Ok(())
    }

    /// This rank gives the round up: it ends with `Cancelled` on every rank. Errors: `InvalidState`
    /// (the round is not open), or what the round has ended with.
    pub fn withdraw(&mut self, reason: &str) -> Result<()> {
        let (api, raw, reason) = (self.owner.api, self.owner.raw(), c_text("reason", reason)?);
        check(api, unsafe { (api.sotto_overlap_withdraw)(raw, reason.as_ptr()) })?;
        self.open = false;
        Ok(())
    }

    /// Hot figures; [`OverlapInfo::missing`] counts gradients that are not marked.
    pub fn info(&self) -> Result<OverlapInfo> {
        info(self.owner, self.comm)
    }

    /// Waits until the round ends. Errors: `InvalidState` (it is open: finish it first; this rank
    /// withdraws), the round's.
    pub fn wait(mut self) -> Result<()> {
        if self.open && !self.flight.test()? {
            return Err(Error::new(
                Status::InvalidState,
                "the round is open, so it would not end: call finish() first",
            ));
        }
        self.flight.wait_to_the_end()
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if self.open {
            let _ = self.withdraw("the round was dropped before it was finished");
        }
    }
}
