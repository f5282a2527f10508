//! The context of one rank, and ids by which ranks find each other.

use std::sync::Arc;
use std::time::Duration;

use sotto_sys as sys;

use crate::error::Result;
use crate::library::{self, c_text, check};
use crate::op::SLICE;
use crate::owner::Owner;

/// Settings of a [`Context`]. Zero means the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextOptions {
    /// Threads for kernels; 0: `SOTTO_CPU_THREADS`, else cores / local ranks.
    pub cpu_threads: u32,
    /// Operations in flight at most; 0: 1024.
    pub max_ops: u32,
    /// No thread of its own: the caller drives [`Context::poll`].
    pub no_progress_thread: bool,
}

/// Devices and progress thread of one rank. Several per process are allowed: ranks as threads.
/// Clones are the same context. It works until what uses it is gone.
#[derive(Clone)]
pub struct Context {
    pub(crate) owner: Arc<Owner<sys::sotto_context>>,
}

impl Context {
    /// A context with the default settings and the `SOTTO_*` variables. Errors: `LibraryLoad`,
    /// `InvalidArgument` (a variable), `InvalidState` (forked from a process that had one).
    pub fn new() -> Result<Context> {
        Context::with(ContextOptions::default())
    }

    /// A context with these settings. Errors: as [`Context::new`].
    pub fn with(options: ContextOptions) -> Result<Context> {
        let api = library::api()?;
        let config = sys::sotto_context_config {
            no_progress_thread: options.no_progress_thread.into(),
            cpu_threads: options.cpu_threads,
            max_ops: options.max_ops,
            ..Default::default()
        };
        let owner = Owner::make(api, api.sotto_context_destroy, |out| unsafe {
            api.sotto_context_create(&config, out)
        })?;
        Ok(Context { owner: Arc::new(owner) })
    }

    /// Makes progress on everything in flight and runs callbacks that are due: waits at most so
    /// long for something to happen, in slices of 0.1 s, after which it may return earlier. Errors:
    /// `InvalidState` (fork, callback).
    pub fn poll(&self, limit: Duration) -> Result<()> {
        let (api, us) = (self.owner.api, limit.min(SLICE).as_micros() as i64);
        check(api, unsafe { (api.sotto_context_poll)(self.owner.raw(), us) })
    }

    /// Report as JSON: version, devices, transports, parameters in force. `kind`: "all". Errors:
    /// `InvalidArgument` (kind).
    pub fn report(&self, kind: &str) -> Result<String> {
        let (api, kind) = (self.owner.api, c_text("kind", kind)?);
        library::report(api, |buf, cap, len| unsafe {
            (api.sotto_context_report)(self.owner.raw(), kind.as_ptr(), buf, cap, len)
        })
    }

    /// Puts work of the trainer into the time line that `SOTTO_TRACE` asks for, in a row of its own;
    /// without one nothing happens. Times: of the monotonic clock, as in
    /// [`OpStats`](crate::OpStats). Errors: `InvalidArgument` (name; the end is before the begin).
    pub fn trace_span(&self, name: &str, begin_ns: i64, end_ns: i64) -> Result<()> {
        let (api, name) = (self.owner.api, c_text("name", name)?);
        check(api, unsafe {
            (api.sotto_trace_span)(self.owner.raw(), name.as_ptr(), begin_ns, end_ns)
        })
    }

    /// Makes an id with which ranks find each other, and listens for them: made on one rank, which
    /// creates its comm with this context; its bytes are carried to the others by any means. One id
    /// makes one comm. Errors: `Transport` (cannot listen).
    pub fn unique_id(&self) -> Result<UniqueId> {
        let (api, mut id) = (self.owner.api, sys::sotto_unique_id::default());
        check(api, unsafe { (api.sotto_unique_id_create)(self.owner.raw(), &mut id) })?;
        Ok(UniqueId(id.bytes))
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Context")
    }
}

/// 128 bytes by which the ranks of one comm find each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; sys::SOTTO_UNIQUE_ID_BYTES]);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId")
    }
}
