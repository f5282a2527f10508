//! What may vary per call.

use std::ffi::c_void;
use std::time::Duration;

use sotto_sys as sys;
use sys::Api;

use crate::callback;
use crate::codec::Codec;
use crate::error::{self, Status};
use crate::library::check;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Integers wrap around.
    Sum,
    /// Integers: without overflow, towards zero.
    Mean,
    /// NaN if any rank has one.
    Min,
    /// NaN if any rank has one.
    Max,
    /// Integers wrap around.
    Prod,
    /// Integers only.
    BitOr,
}

impl Reduce {
    fn code(self) -> i32 {
        match self {
            Reduce::Sum => sys::SOTTO_REDUCE_SUM,
            Reduce::Mean => sys::SOTTO_REDUCE_MEAN,
            Reduce::Min => sys::SOTTO_REDUCE_MIN,
            Reduce::Max => sys::SOTTO_REDUCE_MAX,
            Reduce::Prod => sys::SOTTO_REDUCE_PROD,
            Reduce::BitOr => sys::SOTTO_REDUCE_BIT_OR,
        }
    }
}

/// Priorities from here down are background work.
pub const PRIORITY_BACKGROUND: i32 = sys::SOTTO_PRIORITY_BACKGROUND;

/// A time limit as the library takes it: at least 1 microsecond, since 0 means the default.
pub(crate) fn microseconds(limit: Duration) -> i64 {
    limit.as_micros().clamp(1, i64::MAX as u128) as i64
}

type Done = Box<dyn FnOnce(Result<(), Status>) + Send>;

/// Options of one call. `()` and a [`Reduce`] stand for one with defaults otherwise.
///
/// ```
/// use sotto::{Call, Reduce};
/// use std::time::Duration;
///
/// let call = Call::from(Reduce::Mean).tag(7).timeout(Duration::from_secs(10));
/// # drop(call);
/// ```
#[derive(Default)]
pub struct Call<'a> {
    raw: sys::sotto_call,
    codec: Option<&'a Codec>,
    done: Option<Done>,
}

impl From<()> for Call<'_> {
    fn from(_: ()) -> Self {
        Call::default()
    }
}

impl From<Reduce> for Call<'_> {
    fn from(reduce: Reduce) -> Self {
        let mut call = Call::default();
        call.raw.reduce = reduce.code();
        call
    }
}

impl<'a> From<&'a Codec> for Call<'a> {
    fn from(codec: &'a Codec) -> Self {
        Call::default().codec(codec)
    }
}

impl<'a> Call<'a> {
    /// All defaults.
    pub fn new() -> Call<'a> {
        Call::default()
    }

    /// Must be equal on all ranks of the operation, which is checked.
    pub fn tag(mut self, tag: u64) -> Self {
        self.raw.tag = tag;
        self
    }

    /// Longest time without progress; the comm's without it.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.raw.timeout_us = microseconds(limit);
        self
    }

    /// The operation may stand still for any time.
    pub fn without_timeout(mut self) -> Self {
        self.raw.timeout_us = -1;
        self
    }

    /// Larger is more urgent; equal on all ranks; 0 is normal; [`PRIORITY_BACKGROUND`] and less:
    /// background work.
    pub fn priority(mut self, priority: i32) -> Self {
        self.raw.priority = priority;
        self
    }

    /// How values become one.
    pub fn reduce(mut self, reduce: Reduce) -> Self {
        self.raw.reduce = reduce.code();
        self
    }

    /// Sends the data of an all-reduce compressed; the result is the error-compensated mean.
    pub fn codec(mut self, codec: &'a Codec) -> Self {
        self.codec = Some(codec);
        self
    }

    /// `Busy` instead of waiting for a free operation slot.
    pub fn no_block(mut self) -> Self {
        self.raw.flags |= sys::SOTTO_CALL_NO_BLOCK;
        self
    }

    /// Runs `done` once when the operation has completed, on the thread that waits, tests or polls.
    /// It must not use the library; what it drops of it is given back later. A panic of it ends
    /// there.
    pub fn on_done(mut self, done: impl FnOnce(Result<(), Status>) + Send + 'static) -> Self {
        self.done = Some(Box::new(done));
        self
    }

    /// `on_done` may run on the library's own thread too: as soon as the operation has completed.
    pub fn done_on_any_thread(mut self) -> Self {
        self.raw.flags |= sys::SOTTO_CALL_DONE_ANY_THREAD;
        self
    }

    /// The operation starts after work that is queued on a stream of its buffers' device.
    ///
    /// # Safety
    /// `stream` is a `cudaStream_t`, or NULL: the default stream. The memory of the buffers is in
    /// use by the stream's work and the operation.
    pub unsafe fn stream(mut self, stream: *mut c_void) -> Self {
        self.raw.stream = stream;
        self
    }

    /// Hands the options to `launch`, which returns a code of C below zero if nothing was started.
    pub(crate) fn with<'c>(
        self,
        api: &Api,
        launch: impl FnOnce(*const sys::sotto_call) -> i32,
    ) -> error::Result<()>
    where
        'a: 'c,
    {
        let mut raw = self.raw;
        raw.codec = self.codec.map_or(std::ptr::null_mut(), Codec::raw);
        let done = match self.done {
            Some(done) => done,
            None => return check(api, launch(&raw)),
        };
        let user = Box::into_raw(Box::new(done));
        raw.on_done = Some(run_done);
        raw.user = user.cast();
        let started = check(api, launch(&raw));
        if started.is_err() {
            // It is never called. Handles that it owns are given back, which ends the error's text.
            drop(unsafe { Box::from_raw(user) });
        }
        started
    }
}

/// # Safety
/// `user` is the box of [`Call::with`], for the first and only time.
unsafe extern "C" fn run_done(user: *mut c_void, code: i32) {
    callback::contain(|| {
        let done = Box::from_raw(user.cast::<Done>());
        done(if code < 0 { Err(Status::from_code(code)) } else { Ok(()) });
    });
}
