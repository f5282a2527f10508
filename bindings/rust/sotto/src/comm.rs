//! Groups of ranks.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use sotto_sys as sys;
use sys::Api;

use crate::call::microseconds;
use crate::callback;
use crate::context::{Context, UniqueId};
use crate::error::{Error, Result, Status};
use crate::library::{self, c_text, check, last_error, text_of};
use crate::owner::Owner;

type AllGather<'a> = Box<dyn FnMut(&[u8], &mut [u8]) -> Result<()> + Send + 'a>;

/// How a comm is set up. Defaults are those of the environment of sotto-run, torchrun, Open MPI,
/// MPICH or Slurm.
#[derive(Default)]
pub struct CommOptions<'a> {
    ranks: Option<(u32, u32)>,
    id: Option<UniqueId>,
    transport: Option<String>,
    timeout_us: i64,
    all_gather: Option<AllGather<'a>>,
    native_comm: Option<*mut c_void>,
}

// The native comm is the caller's promise.
unsafe impl Send for CommOptions<'_> {}

impl<'a> CommOptions<'a> {
    /// Rank, size and rendezvous from the launcher's environment.
    pub fn from_env() -> CommOptions<'a> {
        CommOptions::default()
    }

    /// This process is `rank` of `size`, in place of the environment's.
    pub fn ranks(mut self, rank: u32, size: u32) -> Self {
        self.ranks = Some((rank, size));
        self
    }

    /// Ranks find each other by this id, in place of `SOTTO_RENDEZVOUS` or the environment's.
    pub fn id(mut self, id: UniqueId) -> Self {
        self.id = Some(id);
        self
    }

    /// "tcp" or another one that [`build_info`](crate::build_info) lists, in place of
    /// `SOTTO_TRANSPORT`.
    pub fn transport(mut self, name: impl Into<String>) -> Self {
        self.transport = Some(name.into());
        self
    }

    /// Of set-up, and the default of operations; `SOTTO_TIMEOUT_US` (300 s) without it.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout_us = microseconds(limit);
        self
    }

    /// Set-up and operations may take any time.
    pub fn without_timeout(mut self) -> Self {
        self.timeout_us = -1;
        self
    }

    /// An all-gather over a launcher of the caller's own, in place of a rendezvous: writes the
    /// bytes of every rank, in rank order, to its second argument. Needs
    /// [`ranks`](CommOptions::ranks). Called only while the comm is created, on that thread; must
    /// not use the library. Its error, or its panic, is that of the creation.
    pub fn all_gather(
        mut self,
        gather: impl FnMut(&[u8], &mut [u8]) -> Result<()> + Send + 'a,
    ) -> Self {
        self.all_gather = Some(Box::new(gather));
        self
    }

    /// With transport "nccl": this rank's `ncclComm_t`, lent until the comm is destroyed or has
    /// failed, which frees it.
    ///
    /// # Safety
    /// A valid `ncclComm_t` of the same rank and size, which no other code uses meanwhile.
    pub unsafe fn native_comm(mut self, comm: *mut c_void) -> Self {
        self.native_comm = Some(comm);
        self
    }
}

/// The caller's all-gather, and what it has ended with.
struct Gathering<'a> {
    gather: AllGather<'a>,
    size: u32,
    error: Option<Error>,
    panic: Option<Box<dyn Any + Send>>,
}

/// # Safety
/// Called by the library: `user` is a [`Gathering`], `input` has `bytes` bytes and `out` as many of
/// every rank.
unsafe extern "C" fn run_all_gather(
    user: *mut c_void,
    input: *const c_void,
    bytes: u64,
    out: *mut c_void,
) -> i32 {
    let gathering = &mut *user.cast::<Gathering>();
    let n = bytes as usize;
    let input = std::slice::from_raw_parts(input.cast::<u8>(), n);
    let out = std::slice::from_raw_parts_mut(out.cast::<u8>(), n * gathering.size as usize);
    out.fill(0);
    match callback::run(|| (gathering.gather)(input, out)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => gathering.error = Some(error),
        Err(panic) => gathering.panic = Some(panic),
    }
    1
}

/// What a comm shares with all that was made of it: its handle, and a lock, since calls on one comm
/// must not overlap.
pub(crate) struct Shared {
    lock: Mutex<()>,
    holder: AtomicUsize,
    pub(crate) owner: Owner<sys::sotto_comm>,
}

thread_local! {
    static MARK: u8 = const { 0 };
}

/// A number that no other thread has at this time.
fn this_thread() -> usize {
    MARK.with(|mark| mark as *const u8 as usize)
}

/// The only call on a comm.
pub(crate) struct One<'s> {
    shared: &'s Shared,
    _lock: MutexGuard<'s, ()>,
}

impl Drop for One<'_> {
    fn drop(&mut self) {
        self.shared.holder.store(0, Ordering::Relaxed);
    }
}

impl Shared {
    pub(crate) fn api(&self) -> &'static Api {
        self.owner.api
    }

    /// Waits for other threads' calls. Errors: `InvalidState` (inside a callback; inside another
    /// call, as of what a `Source` does; fork), where waiting would not end.
    pub(crate) fn locked(&self) -> Result<One<'_>> {
        if callback::inside() {
            return Err(Error::new(Status::InvalidState, "called inside a callback"));
        }
        let me = this_thread();
        if self.holder.load(Ordering::Relaxed) == me {
            return Err(Error::new(
                Status::InvalidState,
                "called inside another call on this comm, on the same thread",
            ));
        }
        let lock = match self.lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                self.check_process()?;
                self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
            }
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(lock) => lock,
        };
        self.holder.store(me, Ordering::Relaxed);
        Ok(One { shared: self, _lock: lock })
    }

    /// The thread that has the lock is not in the child of a fork.
    fn check_process(&self) -> Result<()> {
        let mut rank = 0;
        let code = unsafe { (self.api().sotto_comm_rank)(self.owner.raw(), &mut rank) };
        if code == sys::SOTTO_E_INVALID_STATE {
            return Err(last_error(self.api(), code));
        }
        Ok(())
    }
}

/// An ordered set of ranks.
///
/// Collectives take ownership of their buffers and return an [`Op`](crate::Op) at once, which gives
/// them back. All ranks call the same collectives in the same order with the same dtypes, counts,
/// reduction, root and tag: a difference is `Protocol` on every rank.
///
/// A comm may be used by several threads, whose calls come one after the other. It is left when it,
/// its operations and what was made of it are dropped. Not by two owners, nor after it was closed:
///
/// ```compile_fail,E0382
/// fn closed(comm: sotto::Comm) {
///     let _ = comm.close();
///     let _ = comm.barrier(());
/// }
/// ```
pub struct Comm {
    pub(crate) shared: Arc<Shared>,
    rank: u32,
    size: u32,
}

impl Comm {
    /// Creates a comm. Collective; blocks at most the timeout
    /// ([`interruptible`](crate::interruptible) for programs that handle signals). Errors:
    /// `InvalidArgument` (ranks, a used id, the environment), `Timeout` (who is missing),
    /// `PeerLost`, `Protocol`, `Transport`, `Unsupported`.
    pub fn new(context: &Context, options: CommOptions<'_>) -> Result<Comm> {
        let api = context.owner.api;
        let (rank, size) = options.ranks.unwrap_or((0, 0));
        if options.ranks.is_some() && rank >= size {
            return Err(Error::argument(format!(
                "rank is {rank} of {size}; allowed: size from 1, rank 0 to size - 1"
            )));
        }
        if options.all_gather.is_some() && options.ranks.is_none() {
            return Err(Error::argument("all_gather is given without ranks(); it needs both"));
        }
        let transport = options.transport.map(|name| c_text("transport", &name)).transpose()?;
        let id = options.id.map(|id| sys::sotto_unique_id { bytes: id.0 });
        let mut gathering =
            options.all_gather.map(|gather| Gathering { gather, size, error: None, panic: None });
        let mut config = sys::sotto_comm_config {
            rank: number("rank", rank)?,
            size: number("size", size)?,
            id: id.as_ref().map_or(std::ptr::null(), |id| id),
            transport: transport.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
            timeout_us: options.timeout_us,
            native_comm: options.native_comm.unwrap_or(std::ptr::null_mut()),
            ..Default::default()
        };
        if let Some(gathering) = &mut gathering {
            config.all_gather = Some(run_all_gather);
            config.user = (gathering as *mut Gathering).cast();
        }
        let made = Owner::make(api, api.sotto_comm_destroy, |out| unsafe {
            (api.sotto_comm_create)(context.owner.raw(), &config, out)
        });
        if let Some(gathering) = gathering {
            if let Some(panic) = gathering.panic {
                resume_unwind(panic);
            }
            if let (Err(_), Some(error)) = (&made, gathering.error) {
                return Err(error);
            }
        }
        Comm::of(made?)
    }

    fn of(owner: Owner<sys::sotto_comm>) -> Result<Comm> {
        let (api, raw) = (owner.api, owner.raw());
        let (mut rank, mut size) = (0, 0);
        check(api, unsafe { (api.sotto_comm_rank)(raw, &mut rank) })?;
        check(api, unsafe { (api.sotto_comm_size)(raw, &mut size) })?;
        let shared = Arc::new(Shared { lock: Mutex::new(()), holder: AtomicUsize::new(0), owner });
        Ok(Comm { shared, rank: rank as u32, size: size as u32 })
    }

    /// Rank of the caller, 0 .. size-1.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.size
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.shared.api()
    }

    pub(crate) fn raw(&self) -> *mut sys::sotto_comm {
        self.shared.owner.raw()
    }

    /// Ranks with the same color form a new comm, ordered by key, then by rank; `None`: this rank
    /// gets none. Collective; connections are shared, so a failure of one is one of all. Errors:
    /// `InvalidState` (callback), `Protocol`, the comm's own.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Comm>> {
        let api = self.api();
        let color = color.map_or(Ok(-1), |color| number("color", color))?;
        let made = {
            let _one = self.shared.locked()?;
            Owner::maybe(api, api.sotto_comm_destroy, |out| unsafe {
                (api.sotto_comm_split)(self.raw(), color, key, out)
            })?
        };
        made.map(Comm::of).transpose()
    }

    /// Fails the comm and all that share its connections, on every rank: operations in flight end
    /// with `Aborted` and this text. Any thread.
    pub fn abort(&self, reason: &str) -> Result<()> {
        let (api, reason) = (self.api(), c_text("reason", reason)?);
        check(api, unsafe { (api.sotto_comm_abort)(self.raw(), reason.as_ptr()) })
    }

    /// The first cause of failure, the same on all ranks; `None` while the comm is healthy.
    pub fn error(&self) -> Option<Error> {
        let mut text = std::ptr::null();
        let code = unsafe { (self.api().sotto_comm_error)(self.raw(), &mut text) };
        let text = || unsafe { text_of(text) };
        (code < 0).then(|| Error::new(Status::from_code(code), text()))
    }

    /// Report as JSON. `kind`: "all", "counters" (per peer), "routes", "waiting" (who waits for
    /// whom). Errors: `InvalidArgument` (kind).
    pub fn report(&self, kind: &str) -> Result<String> {
        let (api, kind) = (self.api(), c_text("kind", kind)?);
        library::report(api, |buf, cap, len| unsafe {
            (api.sotto_comm_report)(self.raw(), kind.as_ptr(), buf, cap, len)
        })
    }

    /// What an operation would send, before anything is sent, as JSON. `request`: `{"kind":
    /// "all_reduce", "dtype": "fp32", "counts": [1000]}`. Errors: `InvalidArgument` (names the
    /// key).
    pub fn plan(&self, request: &str) -> Result<String> {
        let (api, request) = (self.api(), c_text("request", request)?);
        let _one = self.shared.locked()?;
        library::report(api, |buf, cap, len| unsafe {
            (api.sotto_plan_report)(self.raw(), request.as_ptr(), buf, cap, len)
        })
    }

    /// Bytes and messages of this comm, without its splits.
    pub fn counters(&self) -> Result<Counters> {
        let (api, mut out) = (self.api(), sys::sotto_comm_counters::default());
        check(api, unsafe { (api.sotto_comm_get_counters)(self.raw(), &mut out) })?;
        Ok(Counters::from(out))
    }

    /// Destroys the comm now, also for what was made of it: waits for operations in flight at most
    /// the comm's timeout, then fails those left. A comm that is only dropped is destroyed when
    /// nothing uses it any more. Errors: the first met meanwhile; `InvalidState` (inside a
    /// callback: it is destroyed later).
    pub fn close(self) -> Result<()> {
        crate::left::reap();
        let _one = self.shared.locked()?;
        self.shared.owner.close()
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm(rank {} of {})", self.rank, self.size)
    }
}

/// A number that C has as int32_t.
pub(crate) fn number(what: &str, value: u32) -> Result<i32> {
    i32::try_from(value)
        .map_err(|_| Error::argument(format!("{what} is {value}; allowed: 0 to {}", i32::MAX)))
}

/// What this rank has sent and received in one comm, as measured at the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counters {
    /// Data; equals the plans' prediction exactly.
    pub payload_bytes_sent: u64,
    pub payload_bytes_received: u64,
    /// Headers, trailers, scales, flags; predicted exactly too.
    pub header_bytes_sent: u64,
    pub header_bytes_received: u64,
    /// Flow control; bounded, not predicted.
    pub service_bytes_sent: u64,
    pub service_bytes_received: u64,
    pub messages_sent: u64,
    pub messages_received: u64,
    /// Prediction of what the completed operations sent from here.
    pub payload_bytes_planned: u64,
    pub header_bytes_planned: u64,
    /// In kernels of this comm's operations, in nanoseconds.
    pub kernel_ns: u64,
    pub ops_completed: u64,
}

impl From<sys::sotto_comm_counters> for Counters {
    fn from(c: sys::sotto_comm_counters) -> Counters {
        Counters {
            payload_bytes_sent: c.payload_bytes_sent,
            payload_bytes_received: c.payload_bytes_received,
            header_bytes_sent: c.header_bytes_sent,
            header_bytes_received: c.header_bytes_received,
            service_bytes_sent: c.service_bytes_sent,
            service_bytes_received: c.service_bytes_received,
            messages_sent: c.messages_sent,
            messages_received: c.messages_received,
            payload_bytes_planned: c.payload_bytes_planned,
            header_bytes_planned: c.header_bytes_planned,
            kernel_ns: c.kernel_ns,
            ops_completed: c.ops_completed,
        }
    }
}
