//! Codecs: how an all-reduce encodes data on the wire, and what encoding has left over.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use sotto_sys as sys;

use crate::comm::{Comm, Shared};
use crate::element::Dtype;
use crate::error::Result;
use crate::library::{self, address, c_text, check};
use crate::owner::Owner;
use crate::tensor::Tensor;

/// What an export holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateMode {
    /// Optimizers: what `"sotto": {"checkpoint"}` of the configuration says, `Mean` unless set.
    Configured,
    /// Everything: continues bit for bit on the same number of ranks.
    Exact,
    /// Error feedback is left out and starts at zero again.
    Reset,
    /// Error feedback averaged over the ranks: restores on any number of them. Mostly collective.
    Mean,
    /// Optimizers, outer ones too: exported by one rank alone, imported by all, of any number.
    Common,
}

impl StateMode {
    pub(crate) fn code(self) -> i32 {
        match self {
            StateMode::Configured => sys::SOTTO_STATE_CONFIGURED,
            StateMode::Exact => sys::SOTTO_STATE_EXACT,
            StateMode::Reset => sys::SOTTO_STATE_RESET,
            StateMode::Mean => sys::SOTTO_STATE_MEAN,
            StateMode::Common => sys::SOTTO_STATE_COMMON,
        }
    }
}

/// How all-reduces of float32 tensors of certain counts are sent, with the residual of each.
///
/// Used with [`Call::codec`](crate::Call::codec); the result is the error-compensated mean. It may
/// be moved to another thread, and used by one at a time:
///
/// ```compile_fail,E0277
/// fn shared(codec: &sotto::Codec) {
///     std::thread::scope(|s| {
///         s.spawn(|| codec);
///     });
/// }
/// ```
pub struct Codec {
    owner: Owner<sys::sotto_codec>,
    comm: Arc<Shared>,
    _one_thread_at_a_time: PhantomData<Cell<()>>,
}

impl Codec {
    /// A codec for tensors of these counts, in elements; the same on all ranks. `json`:
    /// `{"type": "onebit"}` and the keys of `sotto_codec_create`. Errors: `InvalidArgument` (names
    /// the key or the tensor).
    pub fn new(comm: &Comm, json: &str, counts: &[usize]) -> Result<Codec> {
        let (api, json) = (comm.api(), c_text("json", json)?);
        let like: Vec<_> =
            counts.iter().map(|&count| Tensor::nowhere(count, Dtype::Float32).view()).collect();
        let _one = comm.shared.locked()?;
        let owner = Owner::make(api, api.sotto_codec_destroy, |out| unsafe {
            let n = like.len() as u64;
            (api.sotto_codec_create)(comm.raw(), json.as_ptr(), like.as_ptr(), n, out)
        })?;
        Ok(Codec { owner, comm: Arc::clone(&comm.shared), _one_thread_at_a_time: PhantomData })
    }

    pub(crate) fn raw(&self) -> *mut sys::sotto_codec {
        self.owner.raw()
    }

    /// The residuals: `Exact`, `Reset`, or `Mean`, which is collective. Errors: `Busy` (in use by
    /// an operation), `InvalidArgument` (mode), the comm's own.
    pub fn export_state(&mut self, mode: StateMode) -> Result<Vec<u8>> {
        let api = self.owner.api;
        let _one = self.comm.locked()?;
        library::export(api, |buf, cap, len| unsafe {
            (api.sotto_codec_state_export)(self.raw(), mode.code(), buf, cap, len)
        })
    }

    /// Replaces the residuals by those of an export in the same mode. Nothing changes on error.
    /// Errors: `InvalidArgument` (damaged; of other tensors, codec, mode, ranks), `Busy`.
    pub fn import_state(&mut self, mode: StateMode, state: &[u8]) -> Result<()> {
        let (api, n) = (self.owner.api, state.len() as u64);
        let _one = self.comm.locked()?;
        check(api, unsafe {
            (api.sotto_codec_state_import)(self.raw(), mode.code(), address(state), n)
        })
    }
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Codec")
    }
}
