//! Calls from C into Rust: no panic passes, and nothing calls the library in turn.

use std::any::Any;
use std::cell::Cell;
use std::panic::{catch_unwind, AssertUnwindSafe};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is inside a callback, where handles cannot be given back.
pub(crate) fn inside() -> bool {
    DEPTH.try_with(Cell::get).unwrap_or(0) > 0
}

/// Runs the body of a callback. `Err`: what it has panicked with.
pub(crate) fn run<R>(body: impl FnOnce() -> R) -> Result<R, Box<dyn Any + Send>> {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            let _ = DEPTH.try_with(|depth| depth.set(depth.get() - 1));
        }
    }
    let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
    let _leave = Leave;
    catch_unwind(AssertUnwindSafe(body))
}

/// Runs the body of a callback whose panics end there, also those of what it has panicked with.
pub(crate) fn contain(body: impl FnOnce()) {
    let dropped = run(body).or_else(|panic| run(|| drop(panic)));
    dropped.unwrap_or_else(std::mem::forget);
}
