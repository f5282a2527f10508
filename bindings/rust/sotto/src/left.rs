//! What was dropped and cannot be freed yet: operations in flight that nobody waits for any more,
//! with their memory, and handles that were dropped inside a callback.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::callback;
use crate::op::Handle;

struct Left {
    until: Option<Arc<Handle>>,
    // Dropped when `until` has completed, outside of callbacks.
    _kept: Box<dyn Any + Send>,
}

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

fn locked<R>(body: impl FnOnce(&mut Vec<Left>) -> R) -> R {
    body(&mut LEFT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Keeps a value until an operation has completed.
pub(crate) fn keep(until: Option<Arc<Handle>>, kept: Box<dyn Any + Send>) {
    locked(|left| left.push(Left { until, _kept: kept }));
}

/// Drops what is not needed any more. Every call that starts something does this first.
pub(crate) fn reap() {
    if callback::inside() {
        return;
    }
    let all = locked(std::mem::take);
    if all.is_empty() {
        return;
    }
    let (wait, done): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|one| one.until.as_ref().map_or(false, |op| op.in_flight()));
    locked(|left| left.extend(wait));
    drop(done); // without the lock: what is dropped may leave something itself
}

/// How many values wait. For tests.
#[doc(hidden)]
pub fn left_behind() -> usize {
    reap();
    locked(|left| left.len())
}
