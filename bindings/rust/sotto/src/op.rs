//! Operations in flight.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sotto_sys as sys;
use sys::Api;

use crate::buffers::Kept;
use crate::callback;
use crate::comm::Shared;
use crate::error::{Error, Result, Status};
use crate::left;
use crate::library::{check, last_error, text_of};

/// Longest time that a wait stays in the library before it looks whether it should stop.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Times (monotonic clock) and bytes of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// At the call, in nanoseconds.
    pub launch_ns: i64,
    /// First step ran; 0 before.
    pub start_ns: i64,
    /// Completed; 0 before.
    pub end_ns: i64,
    /// In kernels of this operation, on a device that runs them at once.
    pub kernel_ns: u64,
    /// What this rank sends in this operation.
    pub payload_bytes_planned: u64,
    /// Headers, trailers, scales and flags of it.
    pub header_bytes_planned: u64,
    /// Threads have stood still for it; -1: a stream waits for it.
    pub exposed_ns: i64,
}

/// How a wait has ended.
pub(crate) enum Waited {
    Ended(Result<()>),
    InFlight,
    Refused(Error),
}

/// One operation's handle, which is given back when it is dropped.
pub struct Handle {
    api: &'static Api,
    raw: *mut sys::sotto_op,
}

// Operations may be asked and waited for on any thread at any time.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) fn new(api: &'static Api, raw: *mut sys::sotto_op) -> Handle {
        Handle { api, raw }
    }

    pub(crate) fn raw(&self) -> *mut sys::sotto_op {
        self.raw
    }

    pub(crate) fn in_flight(&self) -> bool {
        unsafe { (self.api.sotto_op_test)(self.raw) == sys::SOTTO_IN_PROGRESS }
    }

    /// The result of an operation that has completed with `code`.
    fn outcome(&self, code: i32) -> Result<()> {
        if code >= 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        unsafe { (self.api.sotto_op_error)(self.raw, &mut text) };
        let text = unsafe { text_of(text) };
        if text.is_empty() {
            return Err(last_error(self.api, code));
        }
        Err(Error::new(Status::from_code(code), text))
    }

    pub(crate) fn test(&self) -> Option<Result<()>> {
        let code = unsafe { (self.api.sotto_op_test)(self.raw) };
        (code != sys::SOTTO_IN_PROGRESS).then(|| self.outcome(code))
    }

    /// Waits in slices until the operation ends, `limit` is over, or `stop` says so between two of
    /// them. The operation's own deadline ends it at the latest.
    pub(crate) fn wait(&self, limit: Option<Duration>, stop: &mut dyn FnMut() -> bool) -> Waited {
        let slices = Slices::new(limit);
        loop {
            let code = unsafe { (self.api.sotto_op_wait)(self.raw, slices.next_us()) };
            if code == sys::SOTTO_IN_PROGRESS {
                if slices.over() || stop() {
                    return Waited::InFlight;
                }
                continue;
            }
            // A wait that is refused, inside a callback, returns an error that is not the
            // operation's: its memory is still in use.
            let refused = (code < 0).then(|| last_error(self.api, code));
            return match (self.test(), refused) {
                (Some(outcome), _) => Waited::Ended(outcome),
                (None, Some(error)) => Waited::Refused(error),
                (None, None) => Waited::InFlight,
            };
        }
    }

    pub(crate) fn stats(&self) -> Result<OpStats> {
        let mut out = sys::sotto_op_stats::default();
        check(self.api, unsafe { (self.api.sotto_op_get_stats)(self.raw, &mut out) })?;
        Ok(OpStats {
            launch_ns: out.launch_ns,
            start_ns: out.start_ns,
            end_ns: out.end_ns,
            kernel_ns: out.kernel_ns,
            payload_bytes_planned: out.payload_bytes_planned,
            header_bytes_planned: out.header_bytes_planned,
            exposed_ns: out.exposed_ns,
        })
    }

    pub(crate) fn stream_wait(&self, stream: *mut c_void) -> Result<()> {
        check(self.api, unsafe { (self.api.sotto_op_stream_wait)(self.raw, stream) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if callback::inside() {
            left::keep(None, Box::new(Handle { ..*self }));
        } else {
            unsafe { (self.api.sotto_op_release)(self.raw) };
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({:?})", self.raw)
    }
}

/// A time limit that is waited for in slices.
struct Slices {
    end: Option<Instant>,
}

impl Slices {
    fn new(limit: Option<Duration>) -> Slices {
        // A limit beyond what the clock can say is none.
        Slices { end: limit.and_then(|limit| Instant::now().checked_add(limit)) }
    }

    fn next_us(&self) -> i64 {
        let left = self.end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
        left.min(SLICE).as_micros() as i64
    }

    fn over(&self) -> bool {
        self.end.map_or(false, |end| Instant::now() >= end)
    }
}

/// One operation and, when it has ended, its outcome.
pub(crate) struct Flight {
    pub(crate) handle: Arc<Handle>,
    outcome: Option<Result<()>>,
}

impl Flight {
    pub(crate) fn new(handle: Arc<Handle>) -> Flight {
        Flight { handle, outcome: None }
    }

    pub(crate) fn ended(&self) -> bool {
        self.outcome.is_some()
    }

    /// Ok(true) if it has ended well, Ok(false) while it is in flight.
    fn said(&self) -> Result<bool> {
        self.outcome.clone().map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    pub(crate) fn test(&mut self) -> Result<bool> {
        if !self.ended() {
            self.outcome = self.handle.test();
        }
        self.said()
    }

    /// Ok(false): `limit` is over, or `stop` said so. Errors: the operation's, or that of a wait
    /// that was refused.
    pub(crate) fn wait(
        &mut self,
        limit: Option<Duration>,
        stop: &mut dyn FnMut() -> bool,
    ) -> Result<bool> {
        if !self.ended() {
            match self.handle.wait(limit, stop) {
                Waited::Ended(outcome) => self.outcome = Some(outcome),
                Waited::InFlight => {}
                Waited::Refused(error) => return Err(error),
            }
        }
        self.said()
    }

    pub(crate) fn wait_to_the_end(&mut self) -> Result<()> {
        while !self.wait(None, &mut || false)? {}
        Ok(())
    }
}

/// What operations of all kinds have: `$self.flight` is a [`Flight`].
macro_rules! waits {
    () => {
        /// Whether the operation has ended: Ok(true), or its error; Ok(false) while it is in
        /// flight. Makes some progress itself.
        pub fn test(&mut self) -> Result<bool> {
            self.flight.test()
        }

        /// Waits at most so long. Ok(false): time is over and it goes on. Errors: the operation's,
        /// `InvalidState` (inside a callback; it goes on).
        pub fn wait_for(&mut self, limit: std::time::Duration) -> Result<bool> {
            self.flight.wait(Some(limit), &mut || false)
        }

        /// Waits until the operation ends, or `stop`, which is asked every 0.1 s, returns true: for
        /// programs that handle signals. Ok(false): stopped, and it goes on. Errors: as
        /// [`wait_for`](Self::wait_for).
        pub fn wait_unless(&mut self, mut stop: impl FnMut() -> bool) -> Result<bool> {
            self.flight.wait(None, &mut stop)
        }

        /// Times and predicted bytes.
        pub fn stats(&self) -> Result<crate::op::OpStats> {
            self.flight.handle.stats()
        }

        /// Puts what is queued on a stream from now on behind the operation, also if it fails.
        /// Errors: `Unsupported` (host memory has no stream), `InvalidState` (the stream is being
        /// captured).
        ///
        /// # Safety
        /// `stream` is a `cudaStream_t` of the operation's device, or NULL: its default stream.
        pub unsafe fn stream_wait(&self, stream: *mut std::ffi::c_void) -> Result<()> {
            self.flight.handle.stream_wait(stream)
        }
    };
}
pub(crate) use waits;

/// A collective, or a group of them, in flight. It owns its buffers and gives them back when it has
/// completed.
///
/// A wait comes back at the latest when the operation's own deadline is over
/// ([`Call::timeout`](crate::Call::timeout), else the comm's). Dropping an operation in flight
/// neither ends it nor waits: it goes on, and its buffers are freed after it has completed.
/// `std::mem::forget` leaks them. An operation can be waited for once:
///
/// ```compile_fail,E0382
/// fn twice(op: sotto::Op<Vec<f32>>) {
///     let _first = op.wait();
///     let _second = op.wait();
/// }
/// ```
///
/// and its buffers cannot be touched before:
///
/// ```compile_fail,E0382
/// fn early(comm: &sotto::Comm, mut x: Vec<f32>) {
///     let _op = comm.all_reduce(x, ());
///     x[0] = 1.0;
/// }
/// ```
///
/// Borrowed memory has to be lent ([`Tensor::lent`](crate::Tensor::lent), unsafe), since a
/// forgotten operation would outlive the borrow:
///
/// ```compile_fail,E0277
/// fn borrowed(comm: &sotto::Comm, x: &mut [f32]) {
///     let _op = comm.all_reduce(x, ());
/// }
/// ```
#[must_use = "an operation is in flight until it is waited for"]
pub struct Op<B: Send + 'static> {
    flight: Flight,
    buffers: Option<Kept<B>>,
    comm: Arc<Shared>,
}

impl<B: Send + 'static> Op<B> {
    pub(crate) fn new(handle: Handle, buffers: Kept<B>, comm: Arc<Shared>) -> Op<B> {
        Op { flight: Flight::new(Arc::new(handle)), buffers: Some(buffers), comm }
    }

    waits!();

    /// Waits until the operation ends and gives its buffers back. Errors: the operation's; then the
    /// buffers, whose contents are unspecified, are dropped ([`into_buffers`](Op::into_buffers)
    /// keeps them).
    pub fn wait(mut self) -> Result<B> {
        self.flight.wait_to_the_end()?;
        Ok(self.into_buffers().expect("it has ended"))
    }

    /// The buffers of an operation that has ended, well or not; `Err`: it is in flight.
    pub fn into_buffers(mut self) -> std::result::Result<B, Self> {
        let _ = self.flight.test();
        match (self.flight.ended(), self.buffers.take()) {
            (true, Some(buffers)) => Ok(buffers.into_inner()),
            (_, buffers) => {
                self.buffers = buffers;
                Err(self)
            }
        }
    }
}

impl<B: Send + 'static> Drop for Op<B> {
    fn drop(&mut self) {
        if !self.flight.ended() && self.flight.handle.in_flight() {
            let kept = (self.buffers.take(), Arc::clone(&self.comm));
            left::keep(Some(Arc::clone(&self.flight.handle)), Box::new(kept));
        }
    }
}

impl<B: Send + 'static> fmt::Debug for Op<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.flight.outcome {
            None => "in flight",
            Some(Ok(())) => "completed",
            Some(Err(_)) => "failed",
        };
        write!(f, "Op({state})")
    }
}

mod pending {
    use super::Handle;

    pub trait Pending {
        fn pending(&self) -> &Handle;
    }
}

/// Operations of any buffers: what [`wait_any`] and [`wait_all`] take.
pub trait Pending: pending::Pending {}

impl<B: Send + 'static> pending::Pending for Op<B> {
    fn pending(&self) -> &Handle {
        &self.flight.handle
    }
}

impl<B: Send + 'static> Pending for Op<B> {}

/// Waits until one of several operations of one context has ended, well or not: the lowest index.
/// `None`: `limit` is over. Errors: `InvalidArgument` (no operation, several contexts),
/// `InvalidState` (fork, callback).
pub fn wait_any(ops: &[&dyn Pending], limit: Option<Duration>) -> Result<Option<usize>> {
    let first = ops
        .first()
        .ok_or_else(|| Error::argument("wait_any: there is no operation; allowed: one and more"))?;
    let (api, raws) = (first.pending().api, raws_of(ops));
    let (mut index, slices) = (0u64, Slices::new(limit));
    loop {
        let n = raws.len() as u64;
        let us = slices.next_us();
        let code = unsafe { (api.sotto_op_wait_any)(raws.as_ptr(), n, us, &mut index) };
        if code != sys::SOTTO_IN_PROGRESS {
            return check(api, code).map(|()| Some(index as usize));
        }
        if slices.over() {
            return Ok(None);
        }
    }
}

/// Waits until all of several operations of one context have ended. Ok(false): `limit` is over.
/// Errors: that of the first that has failed (all have ended then), `InvalidArgument` (several
/// contexts), `InvalidState` (fork, callback).
pub fn wait_all(ops: &[&dyn Pending], limit: Option<Duration>) -> Result<bool> {
    let api = match ops.first() {
        Some(first) => first.pending().api,
        None => return Ok(true),
    };
    let raws = raws_of(ops);
    let slices = Slices::new(limit);
    loop {
        let n = raws.len() as u64;
        let code = unsafe { (api.sotto_op_wait_all)(raws.as_ptr(), n, slices.next_us()) };
        if code != sys::SOTTO_IN_PROGRESS {
            return check(api, code).map(|()| true);
        }
        if slices.over() {
            return Ok(false);
        }
    }
}

fn raws_of(ops: &[&dyn Pending]) -> Vec<*mut sys::sotto_op> {
    ops.iter().map(|op| op.pending().raw()).collect()
}
