//! The library's log.

use std::ffi::c_void;
use std::os::raw::c_char;
use std::sync::{Arc, Mutex};

use crate::callback;
use crate::error::Result;
use crate::library::{self, check, text_of};

/// How much a message matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Level {
    Error = 1,
    Warning,
    Info,
    Debug,
    Trace,
}

const LEVELS: [Level; 5] = [Level::Error, Level::Warning, Level::Info, Level::Debug, Level::Trace];

type Sink = Arc<dyn Fn(Level, &str) + Send + Sync>;

static SINK: Mutex<Option<Sink>> = Mutex::new(None);

fn exchange(sink: Option<Sink>) -> Option<Sink> {
    let mut current = SINK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    std::mem::replace(&mut current, sink)
}

/// # Safety
/// Called by the library, on any thread: `message` is a text.
unsafe extern "C" fn receive(_: *mut c_void, level: i32, message: *const c_char) {
    callback::contain(|| {
        let sink = SINK.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let level = LEVELS[(level.clamp(1, 5) - 1) as usize];
        if let Some(sink) = sink {
            sink(level, &text_of(message));
        }
    });
}

/// Sends the log of the whole process to `sink` instead of standard error. It is called on any
/// thread, must not use the library, and its panics end there. `level`: messages above it are
/// dropped; `None`: `SOTTO_LOG`, else warnings. Errors: `InvalidArgument` (bad `SOTTO_LOG`),
/// `LibraryLoad`.
pub fn set_log(
    level: Option<Level>,
    sink: impl Fn(Level, &str) + Send + Sync + 'static,
) -> Result<()> {
    let api = library::api()?;
    let before = exchange(Some(Arc::new(sink)));
    let level = level.map_or(0, |level| level as i32);
    let code = unsafe { (api.sotto_set_log)(Some(receive), std::ptr::null_mut(), level) };
    check(api, code).map_err(|error| {
        exchange(before);
        error
    })
}

/// Sends the log to standard error again. `level`: as for [`set_log`].
pub fn log_to_stderr(level: Option<Level>) -> Result<()> {
    let (api, level) = (library::api()?, level.map_or(0, |level| level as i32));
    check(api, unsafe { (api.sotto_set_log)(None, std::ptr::null_mut(), level) })?;
    exchange(None);
    Ok(())
}
