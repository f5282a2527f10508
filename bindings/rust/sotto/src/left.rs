//! What was dropped and cannot be freed yet: operations in flight that nobody waits for any more,
//! with their memory, and handles that were dropped inside a callback.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::callback;
use crate::op::Handle;

struct Left {
    until: Option<Arc<Handle>>,
    waits: bool,
    // Dropped when `until` has completed, outside of callbacks.
    _kept: Box<dyn Any + Send>,
}

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());
static ASIDE: AtomicUsize = AtomicUsize::new(0);

fn locked<R>(body: impl FnOnce(&mut Vec<Left>) -> R) -> R {
    body(&mut LEFT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Keeps memory until an operation has completed.
pub(crate) fn keep(until: Option<Arc<Handle>>, kept: Box<dyn Any + Send>) {
    locked(|left| left.push(Left { until, waits: false, _kept: kept }));
}

/// As [`keep`], of what may wait for other ranks while it is dropped: for averages under way.
pub(crate) fn keep_what_waits(until: Option<Arc<Handle>>, kept: Box<dyn Any + Send>) {
    locked(|left| left.push(Left { until, waits: true, _kept: kept }));
}

/// What is dropped on a thread of its own. The call that has found it may be one that other ranks
/// need, also those of this process, before the drop can end.
struct Aside(Vec<Left>);

impl Aside {
    fn begin(left: Vec<Left>) {
        ASIDE.fetch_add(left.len(), Ordering::SeqCst);
        let aside = Aside(left);
        // Without a thread it is dropped here, with the closure.
        let _ = thread::Builder::new().name("sotto-left".into()).spawn(move || drop(aside));
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let n = self.0.len();
        self.0.clear();
        ASIDE.fetch_sub(n, Ordering::SeqCst);
    }
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
    let (waits, done): (Vec<_>, Vec<_>) = done.into_iter().partition(|one| one.waits);
    if !waits.is_empty() {
        Aside::begin(waits);
    }
    drop(done); // without the lock: what is dropped may leave something itself
}

/// How many values wait. For tests.
#[doc(hidden)]
pub fn left_behind() -> usize {
    reap();
    locked(|left| left.len()) + ASIDE.load(Ordering::SeqCst)
}
