//! What optimizers, outer optimizers and overlaps have in common: memory that is registered with a
//! handle, and one step at a time that works on it.

use std::sync::Arc;

use sotto_sys as sys;
use sys::Api;

use crate::call::Call;
use crate::comm::{Comm, Shared};
use crate::error::{Error, Result, Status};
use crate::left;
use crate::library::check;
use crate::op::{waits, Flight, Handle};
use crate::overlap::Rounds;
use crate::owner::Owner;

/// What is freed together, in this order.
pub(crate) struct Parts<T: 'static, M> {
    /// The last step.
    flight: Option<Arc<Handle>>,
    /// The outer steps of an optimizer.
    pub(crate) outer: Option<Owner<sys::sotto_outer>>,
    /// The overlap whose rounds are steps of an optimizer.
    pub(crate) rounds: Option<Rounds>,
    pub(crate) owner: Owner<T>,
    pub(crate) memory: M,
    pub(crate) comm: Arc<Shared>,
}

/// A handle with the memory that it borrows. While a step is in flight the memory is out of reach;
/// a step that nobody waits for any more keeps it alive.
pub(crate) struct Registered<T: 'static, M: Send + 'static> {
    parts: Option<Box<Parts<T, M>>>, // None only while it is dropped
}

impl<T, M: Send + 'static> Registered<T, M> {
    pub(crate) fn new(owner: Owner<T>, memory: M, comm: &Comm) -> Registered<T, M> {
        let comm = Arc::clone(&comm.shared);
        Registered {
            parts: Some(Box::new(Parts {
                flight: None,
                outer: None,
                rounds: None,
                owner,
                memory,
                comm,
            })),
        }
    }

    pub(crate) fn parts(&self) -> &Parts<T, M> {
        self.parts.as_ref().expect("it is not being dropped")
    }

    pub(crate) fn parts_mut(&mut self) -> &mut Parts<T, M> {
        self.parts.as_mut().expect("it is not being dropped")
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.parts().owner.api
    }

    pub(crate) fn raw(&self) -> *mut T {
        self.parts().owner.raw()
    }

    pub(crate) fn in_flight(&self) -> bool {
        self.parts().flight.as_ref().map_or(false, |step| step.in_flight())
    }

    fn idle(&self) -> Result<()> {
        if self.in_flight() {
            return Err(Error::new(
                Status::Busy,
                "a step is in flight, which may write the memory: wait for it first",
            ));
        }
        Ok(())
    }

    /// The memory. Errors: `Busy` (a step is in flight).
    pub(crate) fn memory(&self) -> Result<&M> {
        self.idle()?;
        Ok(&self.parts().memory)
    }

    /// The memory. Errors: `Busy` (a step is in flight).
    pub(crate) fn memory_mut(&mut self) -> Result<&mut M> {
        self.idle()?;
        Ok(&mut self.parts_mut().memory)
    }

    /// A call that starts nothing.
    pub(crate) fn call(&self, body: impl FnOnce(&Api, *mut T) -> i32) -> Result<()> {
        let _one = self.parts().comm.locked()?;
        check(self.api(), body(self.api(), self.raw()))
    }

    /// Starts a step: `launch(handle, call, out_op)`.
    pub(crate) fn start<'a>(
        &mut self,
        call: impl Into<Call<'a>>,
        launch: impl FnOnce(&Parts<T, M>, *const sys::sotto_call, *mut *mut sys::sotto_op) -> i32,
    ) -> Result<Step<'_>> {
        left::reap();
        let (api, mut op) = (self.api(), std::ptr::null_mut());
        let parts = self.parts_mut();
        {
            let _one = parts.comm.locked()?;
            call.into().with(api, |call| launch(parts, call, &mut op))?;
        }
        let handle = Arc::new(Handle::new(api, op));
        parts.flight = Some(Arc::clone(&handle));
        Ok(Step { flight: Flight::new(handle), _borrowed: std::marker::PhantomData })
    }

    /// The step in flight once more, after a replay.
    pub(crate) fn again(&mut self, handle: Arc<Handle>) -> Step<'_> {
        self.parts_mut().flight = Some(Arc::clone(&handle));
        Step { flight: Flight::new(handle), _borrowed: std::marker::PhantomData }
    }

    /// Waits for a step in flight, at most its deadline, and destroys the handle.
    pub(crate) fn close(&mut self) -> Result<()> {
        if let Some(step) = self.parts_mut().flight.clone() {
            let mut flight = Flight::new(step);
            let ended = flight.wait_to_the_end();
            if !flight.ended() {
                return ended; // refused: dropped as it is
            }
        }
        self.destroy()
    }

    /// Destroys the handles, in the order in which they need each other.
    pub(crate) fn destroy(&mut self) -> Result<()> {
        let parts = self.parts_mut();
        let rounds = parts.rounds.as_ref().map_or(Ok(()), |rounds| rounds.owner.close());
        let outer = parts.outer.as_ref().map_or(Ok(()), Owner::close);
        rounds.and(outer).and(parts.owner.close())
    }
}

impl<T, M: Send + 'static> Drop for Registered<T, M> {
    fn drop(&mut self) {
        let parts = self.parts.take().expect("it is dropped once");
        let in_flight = parts.flight.clone().filter(|step| step.in_flight());
        if in_flight.is_some() || crate::callback::inside() {
            left::keep_what_waits(in_flight, parts);
        }
    }
}

/// A step in flight. Until it has ended what it works on is out of reach; dropped before, it goes
/// on, and the next step is `Busy` until it has ended.
#[must_use = "a step is in flight until it is waited for"]
pub struct Step<'a> {
    flight: Flight,
    _borrowed: std::marker::PhantomData<&'a mut ()>,
}

impl Step<'_> {
    waits!();

    /// Waits until the step ends. Errors: the step's; then nothing was updated. `InvalidState`
    /// (inside a callback; it goes on).
    pub fn wait(mut self) -> Result<()> {
        self.flight.wait_to_the_end()
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.flight.handle
    }
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Step")
    }
}
