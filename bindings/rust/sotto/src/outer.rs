//! Outer optimizers: local steps whose changes are averaged in the background.

use std::sync::Arc;

use sotto_sys as sys;
use sys::Api;

use crate::call::Call;
use crate::codec::StateMode;
use crate::comm::{Comm, Shared};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::library::{self, address, c_text};
use crate::owner::Owner;
use crate::params::{self, parameter_memory, CParams, Param};
use crate::registered::{Registered, Step};
use crate::tensor::Tensor;
use crate::text::counted;

/// What a step of an outer optimizer has done: bits of [`OuterInfo::events`].
pub mod events {
    use sotto_sys as sys;

    /// An average was launched.
    pub const LAUNCHED: u32 = sys::SOTTO_OUTER_LAUNCHED;
    /// Live parameters have changed.
    pub const CONSUMED: u32 = sys::SOTTO_OUTER_CONSUMED;
    /// They are back at the anchor: there was no average yet.
    pub const HELD: u32 = sys::SOTTO_OUTER_HELD;
    /// The average was late.
    pub const WAITED: u32 = sys::SOTTO_OUTER_WAITED;
    /// A period "auto" is not chosen yet: it is measured.
    pub const MEASURING: u32 = sys::SOTTO_OUTER_MEASURING;
}

/// Hot figures of an outer optimizer. Those of an update are of the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OuterInfo {
    /// Of the last step: [`events`], or-ed.
    pub events: u32,
    /// Inner steps done.
    pub step: u64,
    /// Averages consumed.
    pub round: u64,
    /// Inner steps until something happens.
    pub next_boundary: u64,
    /// Parts that the parameters are averaged in.
    pub fragments: u32,
    /// Averages launched and not consumed.
    pub in_flight: u32,
    /// Of all ranks, with the last average.
    pub votes: u32,
    /// Ranks with NaN or Inf, which the last average has left out.
    pub not_finite: u32,
    /// Staleness penalty: what a late average was divided by.
    pub lambda: f64,
    /// Length of the anchor's update that the average had missed.
    pub gap: f64,
    /// What the gap is compared with.
    pub unit: f64,
    /// Share of elements whose momentum was limited.
    pub clip_fraction: f64,
    /// Root of the mean over ranks of the squared change of a period.
    pub delta_norm: f64,
    /// Length of the anchor's update.
    pub step_norm: f64,
    /// Of slow directions, for the settings.
    pub gain: f64,
    /// Share of the time of averages that was hidden.
    pub overlap_ratio: f64,
    /// How much longer an inner step takes beside an average; NaN: not known.
    pub contention: f64,
    /// Of the last average that was consumed; -1: none.
    pub network_ns: i64,
    /// The part of it in which a step waited; -1: none.
    pub exposed_ns: i64,
    /// What this rank will send, of the first fragment.
    pub payload_bytes_next_launch: u64,
    /// Headers of it.
    pub header_bytes_next_launch: u64,
    /// Memory held.
    pub state_bytes: u64,
    /// Inner steps from one launch of a fragment to the next, now.
    pub period: u64,
    /// Inner steps from a launch to its consumption, now.
    pub delay: u64,
    /// Mean of the losses that ranks had set at the last average; NaN: none had.
    pub loss: f64,
}

impl From<sys::sotto_outer_info> for OuterInfo {
    fn from(c: sys::sotto_outer_info) -> OuterInfo {
        OuterInfo {
            events: c.events,
            step: c.step,
            round: c.round,
            next_boundary: c.next_boundary,
            fragments: c.fragments,
            in_flight: c.in_flight,
            votes: c.votes,
            not_finite: c.not_finite,
            lambda: c.lambda,
            gap: c.gap,
            unit: c.unit,
            clip_fraction: c.clip_fraction,
            delta_norm: c.delta_norm,
            step_norm: c.step_norm,
            gain: c.gain,
            overlap_ratio: c.overlap_ratio,
            contention: c.contention,
            network_ns: c.network_ns,
            exposed_ns: c.exposed_ns,
            payload_bytes_next_launch: c.payload_bytes_next_launch,
            header_bytes_next_launch: c.header_bytes_next_launch,
            state_bytes: c.state_bytes,
            period: c.period,
            delay: c.delay,
            loss: c.loss,
        }
    }
}

/// What an outer optimizer and the outer steps of an optimizer both have: `self.outer_call` calls
/// the handle, `self.outer_start` starts a step.
macro_rules! outer_calls {
    () => {
        /// Averages and consumes everything: live parameters become the anchor. For the end of a
        /// training; a second call does nothing. Collective. Errors: `Busy`, the comm's own.
        pub fn flush<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
            self.outer_start(call, |api, raw, call, op| unsafe {
                (api.sotto_outer_flush)(raw, call, op)
            })
        }

        /// Puts the anchor into the place of the live parameters, for an evaluation; the next call
        /// puts them back, bit for bit. Local. Errors: `Busy`, `OutOfMemory`.
        pub fn swap<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
            self.outer_start(call, |api, raw, call, op| unsafe {
                (api.sotto_outer_swap)(raw, call, op)
            })
        }

        /// Sets what belongs to the next steps: "lr" (the inner learning rate), "loss" (what this
        /// rank tells the others), "weight" (1, or 0: this rank's inner steps do not count),
        /// "retune" (1: a period "auto" is measured anew). Errors: `InvalidArgument` (name, value),
        /// `Busy`, `InvalidState` (lr, retune).
        pub fn set(&mut self, name: &str, value: f64) -> Result<()> {
            let name = c_text("name", name)?;
            self.outer_call(|api, raw| unsafe { (api.sotto_outer_set)(raw, name.as_ptr(), value) })
        }

        /// Bits that travel with the next average; [`OuterInfo::votes`] has those of all ranks.
        /// Errors: `Busy`.
        pub fn vote(&mut self, bits: u32) -> Result<()> {
            self.outer_call(|api, raw| unsafe { (api.sotto_outer_vote)(raw, bits) })
        }

        /// Hot figures. Errors: `Busy` (a step in flight).
        pub fn info(&self) -> Result<OuterInfo> {
            let mut out = sys::sotto_outer_info::default();
            self.outer_call(|api, raw| unsafe { (api.sotto_outer_get_info)(raw, &mut out) })?;
            Ok(out.into())
        }
    };
}

/// An outer optimizer over parameters whose memory it owns, the same on all ranks. The program
/// makes its own inner steps on them ([`param_mut`](Outer::param_mut)) and calls
/// [`step`](Outer::step) after each.
pub struct Outer {
    inner: Registered<sys::sotto_outer, Vec<Param>>,
    _shards: Option<Arc<Shared>>, // used by `inner`, which is dropped before
}

impl Outer {
    /// Creates an outer optimizer; the values are the first anchor. Collective. `json`: `{"preset":
    /// "co2", "period": 48}`, or a file with `"sotto": {"outer": {...}}`. `params`:
    /// [`Param::live`]. Errors: `InvalidArgument` (names the key or the parameter), `Unsupported`,
    /// `Protocol`, the comm's own.
    pub fn new(comm: &Comm, json: &str, params: Vec<Param>) -> Result<Outer> {
        Outer::make(comm, None, json, params)
    }

    /// The same for parameters that are shards: `comm` is of the ranks that hold the same shard,
    /// `shards` of those that hold the shards of this rank's replica, every element on one of them.
    /// Norms are of the whole parameters. Collective among both. Errors: as [`new`](Outer::new);
    /// `Unsupported` also for what every shard would decide for itself.
    pub fn sharded(comm: &Comm, shards: &Comm, json: &str, params: Vec<Param>) -> Result<Outer> {
        Outer::make(comm, Some(shards), json, params)
    }

    fn make(comm: &Comm, shards: Option<&Comm>, json: &str, params: Vec<Param>) -> Result<Outer> {
        let (api, json) = (comm.api(), c_text("json", json)?);
        let c = CParams::new(&params)?;
        let owner = {
            let _one = comm.shared.locked()?;
            Owner::make(api, api.sotto_outer_destroy, |out| unsafe {
                let (structs, n) = (c.structs.as_ptr(), c.structs.len() as u64);
                let json = json.as_ptr();
                match shards {
                    None => (api.sotto_outer_create)(comm.raw(), json, structs, n, out),
                    Some(shards) => (api.sotto_outer_create_sharded)(
                        comm.raw(),
                        shards.raw(),
                        json,
                        structs,
                        n,
                        out,
                    ),
                }
            })?
        };
        let _shards = shards.map(|shards| Arc::clone(&shards.shared));
        Ok(Outer { inner: Registered::new(owner, params, comm), _shards })
    }

    parameter_memory!(sotto_outer_set_params);
    outer_calls!();

    fn outer_call(&self, body: impl FnOnce(&Api, *mut sys::sotto_outer) -> i32) -> Result<()> {
        self.inner.call(body)
    }

    fn outer_start<'a>(
        &mut self,
        call: impl Into<Call<'a>>,
        launch: impl FnOnce(
            &Api,
            *mut sys::sotto_outer,
            *const sys::sotto_call,
            *mut *mut sys::sotto_op,
        ) -> i32,
    ) -> Result<Step<'_>> {
        self.inner
            .start(call, |parts, call, op| launch(parts.owner.api, parts.owner.raw(), call, op))
    }

    /// Counts an inner step, which has changed the live parameters. Every period it averages,
    /// where an average is due it moves the anchor and the parameters. Errors: `Busy`,
    /// `InvalidState` (the anchor is swapped in), the comm's own; of the step also `Nonfinite`.
    pub fn step<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
        self.outer_start(call, |api, raw, call, op| unsafe {
            (api.sotto_outer_step)(raw, call, op)
        })
    }

    /// This rank's state, parameters included; waits for the average under way. `Exact`, `Common`,
    /// or, without error feedback kept, `Reset` and `Mean`. Errors: `Busy`, `Unsupported` (mode).
    pub fn export_state(&mut self, mode: StateMode) -> Result<Vec<u8>> {
        let api = self.inner.api();
        let _one = self.inner.parts().comm.locked()?;
        library::export(api, |buf, cap, len| unsafe {
            (api.sotto_outer_state_export)(self.inner.raw(), mode.code(), buf, cap, len)
        })
    }

    /// Replaces this rank's state, parameters and model copies included. Nothing changes on error.
    /// Errors: `InvalidArgument` (damaged; of other settings, parameters, ranks), `Busy`.
    pub fn import_state(&mut self, mode: StateMode, state: &[u8]) -> Result<()> {
        self.inner.memory_mut()?;
        self.inner.call(|api, raw| unsafe {
            let n = state.len() as u64;
            (api.sotto_outer_state_import)(raw, mode.code(), address(state), n)
        })
    }

    /// Waits for a step and averages in flight, at most their deadlines, and destroys the outer
    /// optimizer. Errors: `InvalidState` (inside a callback: it is destroyed later).
    pub fn close(mut self) -> Result<()> {
        self.inner.close()
    }
}

impl std::fmt::Debug for Outer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outer({})", counted(self.len(), "parameter"))
    }
}

/// The outer steps of an [`Optimizer`](crate::Optimizer), whose steps make them.
pub struct OuterSteps<'o> {
    inner: &'o mut Registered<sys::sotto_optim, Vec<Param>>,
}

impl<'o> OuterSteps<'o> {
    pub(crate) fn new(inner: &'o mut Registered<sys::sotto_optim, Vec<Param>>) -> OuterSteps<'o> {
        OuterSteps { inner }
    }

    outer_calls!();

    fn outer_call(&self, body: impl FnOnce(&Api, *mut sys::sotto_outer) -> i32) -> Result<()> {
        let outer = self.inner.parts().outer.as_ref().expect("made before").raw();
        self.inner.call(|api, _| body(api, outer))
    }

    fn outer_start<'a>(
        &mut self,
        call: impl Into<Call<'a>>,
        launch: impl FnOnce(
            &Api,
            *mut sys::sotto_outer,
            *const sys::sotto_call,
            *mut *mut sys::sotto_op,
        ) -> i32,
    ) -> Result<Step<'_>> {
        self.inner.start(call, |parts, call, op| {
            let outer = parts.outer.as_ref().expect("made before").raw();
            launch(parts.owner.api, outer, call, op)
        })
    }
}
