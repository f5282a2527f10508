//! Calls that may wait for other ranks, in programs that handle signals themselves.

use std::sync::mpsc::{channel, RecvTimeoutError};

use crate::op::SLICE;

/// Runs a call that may wait for other ranks on a thread of its own, until it ends, or `stop`,
/// which is asked every 0.1 s, returns true. `None`: stopped; the call goes on, at most to its
/// deadline, and what it makes is dropped. A panic of `work` goes on here.
///
/// Without a handler of the program's own Ctrl-C ends the process at once, also while it waits.
///
/// ```no_run
/// # use std::sync::atomic::{AtomicBool, Ordering};
/// static STOP: AtomicBool = AtomicBool::new(false); // set by a handler of SIGINT
/// let comm = sotto::interruptible(sotto::init, || STOP.load(Ordering::Relaxed));
/// # drop(comm);
/// ```
pub fn interruptible<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
    mut stop: impl FnMut() -> bool,
) -> Option<R> {
    let (send, receive) = channel();
    let thread = std::thread::spawn(move || {
        let _ = send.send(work()); // nobody receives what comes after a stop
    });
    loop {
        match receive.recv_timeout(SLICE) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Timeout) if stop() => return None,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("the thread sends before it ends"),
            },
        }
    }
}
