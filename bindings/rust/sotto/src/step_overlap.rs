//! Steps of an optimizer that begin before its gradients are there.

use std::ptr;

use crate::call::Call;
use crate::error::{Error, Result, Status};
use crate::library::c_text;
use crate::optimizer::Optimizer;
use crate::overlap::{self, OverlapInfo, Round, Rounds, Slot};
use crate::owner::Owner;
use crate::tensor::Tensor;

impl Optimizer {
    /// Makes an overlap whose rounds are steps of this optimizer ([`begin`](Optimizer::begin)), in
    /// place of one that it has. Collective. `json`: `None`: `"sotto": {"overlap"}` of the
    /// configuration, or defaults; else the keys of `sotto_overlap_create_step`. Errors:
    /// `InvalidArgument` (names the key), `Unsupported` (outer steps, mode compat), `Busy`,
    /// `Protocol`, the comm's own.
    pub fn overlap(&mut self, json: Option<&str>) -> Result<()> {
        self.inner.memory_mut()?;
        let json = json.map(|json| c_text("json", json)).transpose()?;
        let json = json.as_ref().map_or(ptr::null(), |json| json.as_ptr());
        let parts = self.inner.parts_mut();
        parts.rounds = None;
        let api = parts.owner.api;
        let _one = parts.comm.locked()?;
        let owner = Owner::make(api, api.sotto_overlap_destroy, |out| unsafe {
            (api.sotto_overlap_create_step)(parts.owner.raw(), json, out)
        })?;
        parts.rounds = Some(Rounds { owner, slots: Vec::new() });
        Ok(())
    }

    fn rounds(&self) -> Result<&Rounds> {
        self.inner.parts().rounds.as_ref().ok_or_else(|| {
            Error::new(Status::InvalidState, "the optimizer has no overlap: call overlap() first")
        })
    }

    /// Begins a step, to which gradients are reported as they become ready; gradient i is that of
    /// parameter i, where the optimizer has it, or in memory that [`Round::ready_at`] gives. The step
    /// is done, to the bit as that of [`step`](Optimizer::step), when the round has ended well.
    /// Collective. Errors: `InvalidState` (no [`overlap`](Optimizer::overlap)), those of `step`.
    ///
    /// ```no_run
    /// # fn compute(index: usize, gradient: &mut [f32]) {}
    /// # fn train(optimizer: &mut sotto::Optimizer) -> sotto::Result<()> {
    /// optimizer.overlap(None)?;
    /// let mut round = optimizer.begin(())?;
    /// for index in [1, 0] {
    ///     round.ready_with(index, |gradient| compute(index, gradient))?;
    /// }
    /// round.finish()?;
    /// round.wait()
    /// # }
    /// ```
    pub fn begin<'a>(&mut self, call: impl Into<Call<'a>>) -> Result<Round<'_>> {
        let overlap = self.rounds()?.owner.raw();
        let handle = {
            let step = self.inner.start(call, |parts, call, op| unsafe {
                (parts.owner.api.sotto_overlap_begin)(overlap, call, op)
            })?;
            step.handle().clone()
        };
        // While the round is open the optimizer's own memory is out of reach: these are in its place.
        let parts = self.inner.parts_mut();
        let grads = parts.memory.iter().map(|param| param.grad.as_ref());
        let slots = grads.map(|grad| Slot::of_optimizer(grad.expect("an optimizer has gradients")));
        let slots = slots.collect();
        let rounds = parts.rounds.as_mut().expect("looked for before");
        rounds.slots = slots;
        Ok(Round::new(&rounds.owner, &rounds.slots, &parts.comm, handle))
    }

    /// Takes the memory back that [`Round::ready_at`] has given in the last round. Errors: `Busy` (a
    /// step is in flight), `InvalidArgument` (index), `InvalidState` (no overlap).
    pub fn take_gradient(&mut self, index: usize) -> Result<Tensor> {
        self.rounds()?;
        self.inner.memory_mut()?;
        let slots = &mut self.inner.parts_mut().rounds.as_mut().expect("looked for before").slots;
        let n = slots.len();
        let slot = slots.get_mut(index).ok_or_else(|| overlap::out_of_range(index, n))?;
        overlap::inside(slot).take(index)
    }

    /// Hot figures of the overlap. Errors: `InvalidState` (no overlap).
    pub fn overlap_info(&self) -> Result<OverlapInfo> {
        overlap::info(&self.rounds()?.owner, &self.inner.parts().comm)
    }

    /// Report of the overlap as JSON. `kind`: "all", "buckets", "order". Errors: `InvalidArgument`
    /// (kind), `InvalidState` (no overlap).
    pub fn overlap_report(&self, kind: &str) -> Result<String> {
        overlap::report(&self.rounds()?.owner, &self.inner.parts().comm, kind)
    }

    /// A round that was forgotten while it was open would never end.
    pub(crate) fn withdraw_if_open(&self) {
        if let Some(rounds) = &self.inner.parts().rounds {
            overlap::withdraw_if_open(&rounds.owner, self.inner.in_flight());
        }
    }
}
