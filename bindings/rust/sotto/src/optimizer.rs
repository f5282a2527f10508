//! Optimizers: what DeepSpeed's configuration describes, on memory of their own.

use std::sync::Arc;

use sotto_sys as sys;

use crate::call::Call;
use crate::comm::{number, Comm};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::library::{self, c_text};
use crate::op::Handle;
use crate::outer::OuterSteps;
use crate::owner::Owner;
use crate::params::{self, parameter_memory, CParams, Param};
use crate::registered::{Registered, Step};
use crate::tensor::Tensor;
use crate::text::counted;

/// Hot figures of an optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OptimInfo {
    /// 0: full precision (warm-up), 1: compressed.
    pub stage: i32,
    /// Updates done.
    pub step: u64,
    /// Step number of checkpoints and schedules.
    pub state_step: u64,
    /// Of group 0 for the next step.
    pub lr: f64,
    /// Last step, before clipping; NaN: not computed.
    pub grad_norm: f64,
    /// What this rank will send in the next step.
    pub payload_bytes_next_step: u64,
    /// Headers of it.
    pub header_bytes_next_step: u64,
    /// Memory held.
    pub state_bytes: u64,
    /// Steps that updated nothing.
    pub skipped_steps: u64,
    /// Gradients of the next step have to be multiplied with it; 1: none.
    pub loss_scale: f64,
    /// Accumulated for the next step.
    pub micro_batches: u64,
}

/// An optimizer over parameters whose memory it owns, the same on all ranks.
///
/// ```no_run
/// # fn main() -> sotto::Result<()> {
/// let comm = sotto::init()?;
/// let json = r#"{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 20}}}"#;
/// let weights = sotto::Param::new(vec![1.0f32; 1000], vec![0.0f32; 1000]).name("weights");
/// let mut optimizer = sotto::Optimizer::new(&comm, json, vec![weights])?;
/// for _ in 0..40 {
///     let (param, grad) = optimizer.pair_mut::<f32>(0)?;
///     grad.copy_from_slice(param); // the gradient of this rank's batch
///     optimizer.step(())?.wait()?; // averages, clips, updates
/// }
/// # Ok(())
/// # }
/// ```
///
/// Gradients cannot be written while a step reads them:
///
/// ```compile_fail,E0499
/// fn early(optimizer: &mut sotto::Optimizer) -> sotto::Result<()> {
///     let step = optimizer.step(())?;
///     optimizer.grad_mut::<f32>(0)?[0] = 1.0;
///     step.wait()
/// }
/// ```
///
/// and not before a step that was forgotten has ended: that is `Busy`.
pub struct Optimizer {
    pub(crate) inner: Registered<sys::sotto_optim, Vec<Param>>,
}

/// A step that was recorded into a CUDA graph.
#[derive(Debug)]
pub struct Recorded(Arc<Handle>);

impl Optimizer {
    /// Creates an optimizer. Collective; if one rank refuses, all of them end with its error.
    /// `json`: the text of a DeepSpeed file, or `{"optimizer": {...}}`. Errors: `InvalidArgument`
    /// (names the key or the parameter), `Unsupported`, `Protocol` (ranks differ), the comm's own.
    pub fn new(comm: &Comm, json: &str, params: Vec<Param>) -> Result<Optimizer> {
        let (api, json) = (comm.api(), c_text("json", json)?);
        let c = CParams::new(&params)?;
        let owner = {
            let _one = comm.shared.locked()?;
            Owner::make(api, api.sotto_optim_destroy, |out| unsafe {
                let (structs, n) = (c.structs.as_ptr(), c.structs.len() as u64);
                (api.sotto_optim_create)(comm.raw(), json.as_ptr(), structs, n, out)
            })?
        };
        Ok(Optimizer { inner: Registered::new(owner, params, comm) })
    }

    parameter_memory!(sotto_optim_set_params);

    /// Gradient of a parameter, to be filled. Errors: `InvalidArgument` (index, type; in device
    /// memory), `Busy` (a step is in flight).
    pub fn grad_mut<T: Element>(&mut self, index: usize) -> Result<&mut [T]> {
        Ok(self.pair_mut(index)?.1)
    }

    /// Values and gradient of a parameter. Errors: as [`grad_mut`](Optimizer::grad_mut).
    pub fn pair_mut<T: Element>(&mut self, index: usize) -> Result<(&mut [f32], &mut [T])> {
        params::at_mut(self.inner.memory_mut()?, index)?.both()
    }

    /// Values and gradients of all parameters at once. Errors: as
    /// [`grad_mut`](Optimizer::grad_mut).
    pub fn pairs_mut<T: Element>(&mut self) -> Result<Vec<(&mut [f32], &mut [T])>> {
        self.inner.memory_mut()?.iter_mut().map(Param::both).collect()
    }

    /// Says where gradients lie from now on: one tensor for each parameter; `grads` has the former
    /// ones then. Errors: `InvalidArgument` (names the parameter), `Busy`; nothing changes then.
    pub fn set_grads(&mut self, grads: &mut [Tensor]) -> Result<()> {
        self.inner.memory_mut()?;
        let places = params::views(grads);
        self.inner.call(|api, raw| unsafe {
            (api.sotto_optim_set_grads)(raw, places.as_ptr(), places.len() as u64)
        })?;
        params::exchange(self.inner.memory_mut()?, grads, |param| param.grad.as_mut());
        Ok(())
    }

    /// One step with the gradients that are there now: averages, clips, updates. Collective. If it
    /// ends with an error nothing was updated; `Nonfinite` leaves the group healthy. Errors: `Busy`
    /// (a step in flight), the comm's own.
    pub fn step<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
        self.inner.start(call, |parts, call, op| unsafe {
            (parts.owner.api.sotto_optim_step)(parts.owner.raw(), call, op)
        })
    }

    /// Adds the gradients of one micro-batch to those that the next step takes the mean of. Local,
    /// but all ranks make as many calls. Errors: `Busy`, `InvalidState` (more than
    /// `gradient_accumulation_steps`).
    pub fn accumulate<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
        self.inner.start(call, |parts, call, op| unsafe {
            (parts.owner.api.sotto_optim_accumulate)(parts.owner.raw(), call, op)
        })
    }

    /// 0/1 Adam between synchronisations: brings the parameters of all ranks together. Collective.
    /// Where there is nothing to do it does nothing. Errors: `Busy`, `InvalidState` (micro-batches
    /// are accumulated), the comm's own.
    pub fn synchronize<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Step<'_>> {
        self.inner.start(call, |parts, call, op| unsafe {
            (parts.owner.api.sotto_optim_synchronize)(parts.owner.raw(), call, op)
        })
    }

    /// Records a step into the CUDA graph that the stream of `call` is being captured into; it
    /// changes nothing. Errors: as [`step`](Optimizer::step).
    ///
    /// # Safety
    /// The graph is launched once after each [`replay`](Optimizer::replay), never else, and not any
    /// more when the result, the optimizer or the comm is dropped or the comm has failed.
    pub unsafe fn record<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Recorded> {
        Ok(Recorded(Arc::clone(self.step(call)?.handle())))
    }

    /// A recorded step happens with the next launch of its graph, which the caller makes once
    /// before it waits for what is returned. Errors: `InvalidState` (the next step is not like the
    /// recorded one), `Busy`, the comm's own.
    pub fn replay(&mut self, recorded: &Recorded) -> Result<Step<'_>> {
        self.inner.call(|api, raw| unsafe { (api.sotto_optim_replay)(raw, recorded.0.raw()) })?;
        Ok(self.inner.again(Arc::clone(&recorded.0)))
    }

    /// Sets a number that changes during training, on all ranks alike: "lr" (NaN: the schedule
    /// again), "weight_decay", "loss_scale" and the others of `sotto_optim_set`. `group`: `None`:
    /// all. Errors: `InvalidArgument` (name, group, value), `Busy`.
    pub fn set(&mut self, name: &str, group: Option<u32>, value: f64) -> Result<()> {
        let (name, group) = (c_text("name", name)?, group.map_or(Ok(-1), |g| number("group", g))?);
        self.inner
            .call(|api, raw| unsafe { (api.sotto_optim_set)(raw, name.as_ptr(), group, value) })
    }

    /// Says which parameters the next steps leave as they are, with momentum and variance: one flag
    /// for each, the same on all ranks. Errors: `InvalidArgument`, `Busy`; 0/1 Adam, for which it
    /// may be collective: the comm's own.
    pub fn set_frozen(&mut self, frozen: &[bool]) -> Result<()> {
        let flags: Vec<u8> = frozen.iter().map(|&frozen| frozen.into()).collect();
        self.inner.call(|api, raw| unsafe {
            (api.sotto_optim_set_frozen)(raw, flags.as_ptr(), flags.len() as u64)
        })
    }

    /// Hot figures. Errors: `Busy` (a step in flight).
    pub fn info(&self) -> Result<OptimInfo> {
        let mut out = sys::sotto_optim_info::default();
        self.inner.call(|api, raw| unsafe { (api.sotto_optim_get_info)(raw, &mut out) })?;
        Ok(OptimInfo {
            stage: out.stage,
            step: out.step,
            state_step: out.state_step,
            lr: out.lr,
            grad_norm: out.grad_norm,
            payload_bytes_next_step: out.payload_bytes_next_step,
            header_bytes_next_step: out.header_bytes_next_step,
            state_bytes: out.state_bytes,
            skipped_steps: out.skipped_steps,
            loss_scale: out.loss_scale,
            micro_batches: out.micro_batches,
        })
    }

    /// Report as JSON. `kind`: "all", "config", "groups", "tensors". Errors: `InvalidArgument`
    /// (kind), `Busy`.
    pub fn report(&self, kind: &str) -> Result<String> {
        let (api, kind) = (self.inner.api(), c_text("kind", kind)?);
        let _one = self.inner.parts().comm.locked()?;
        library::report(api, |buf, cap, len| unsafe {
            (api.sotto_optim_report)(self.inner.raw(), kind.as_ptr(), buf, cap, len)
        })
    }

    /// The outer steps of a configuration with `"sotto": {"outer": {...}}`, which
    /// [`step`](Optimizer::step) makes: flush, swap, vote, figures. Errors: `InvalidState` (the
    /// configuration has none).
    pub fn outer(&mut self) -> Result<OuterSteps<'_>> {
        let parts = self.inner.parts_mut();
        if parts.outer.is_none() {
            let api = parts.owner.api;
            let _one = parts.comm.locked()?;
            parts.outer = Some(Owner::make(api, api.sotto_outer_destroy, |out| unsafe {
                (api.sotto_optim_outer)(parts.owner.raw(), out)
            })?);
        }
        Ok(OuterSteps::new(&mut self.inner))
    }

    /// Bytes of the trainer's own that are saved and restored with the state; 64 MiB at most.
    /// Errors: `InvalidArgument`, `Busy`.
    pub fn set_user_state(&mut self, data: &[u8]) -> Result<()> {
        self.inner.call(|api, raw| unsafe {
            (api.sotto_optim_set_user_state)(raw, library::address(data), data.len() as u64)
        })
    }

    /// What [`set_user_state`](Optimizer::set_user_state) or the last import has set.
    pub fn user_state(&self) -> Result<Vec<u8>> {
        let api = self.inner.api();
        let _one = self.inner.parts().comm.locked()?;
        library::export(api, |buf, cap, len| unsafe {
            (api.sotto_optim_get_user_state)(self.inner.raw(), buf, cap, len)
        })
    }

    /// Waits for a step in flight, at most its deadline, and destroys the optimizer. Errors:
    /// `InvalidState` (inside a callback: it is destroyed later).
    pub fn close(mut self) -> Result<()> {
        self.withdraw_if_open();
        self.inner.close()
    }

    /// Destroys the optimizer and gives its parameters back, in their order. Errors: as
    /// [`close`](Optimizer::close), `Busy` (a step in flight).
    pub fn into_params(mut self) -> Result<Vec<Tensor>> {
        self.inner.memory_mut()?;
        self.inner.destroy()?;
        let memory = std::mem::take(&mut self.inner.parts_mut().memory);
        Ok(memory.into_iter().map(|param| param.param).collect())
    }
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        self.withdraw_if_open();
    }
}

impl std::fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Optimizer({})", counted(self.len(), "parameter"))
    }
}
