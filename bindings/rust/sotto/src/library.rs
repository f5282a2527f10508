//! The shared library, found once per process on first use; texts and errors of its calls.

use std::ffi::{CStr, CString};
use std::os::raw::c_char;
use std::sync::Mutex;

use sotto_sys::Api;

use crate::error::{Error, Result, Status};
use crate::find::find;
use crate::text::counted;

static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);

/// The library, loaded on the first call.
pub(crate) fn api() -> Result<&'static Api> {
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if loaded.is_none() {
        *loaded = Some(Box::leak(Box::new(find()?)));
    }
    Ok(loaded.expect("was just loaded"))
}

/// A copy of a text of C; "" for NULL.
///
/// # Safety
/// `text` is NULL or leads to a text that ends with a zero byte.
pub(crate) unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    CStr::from_ptr(text).to_string_lossy().into_owned()
}

/// A text for C. `what` names the argument in errors.
pub(crate) fn c_text(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| {
        Error::argument(format!(
            "{what} has a zero byte at {}; allowed: text without one",
            error.nul_position()
        ))
    })
}

/// The error of this thread's last call, which returned `code`.
pub(crate) fn last_error(api: &Api, code: i32) -> Error {
    Error::new(Status::from_code(code), unsafe { text_of((api.sotto_last_error)()) })
}

/// Turns a code below zero into an error with the library's text.
pub(crate) fn check(api: &Api, code: i32) -> Result<()> {
    if code < 0 {
        return Err(last_error(api, code));
    }
    Ok(())
}

/// A report: `ask(buf, cap, out_len)`, asked again while it grows.
pub(crate) fn report(
    api: &Api,
    mut ask: impl FnMut(*mut c_char, u64, *mut u64) -> i32,
) -> Result<String> {
    let mut needed = 0u64;
    check(api, ask(std::ptr::null_mut(), 0, &mut needed))?;
    loop {
        let mut room = vec![0u8; needed as usize + 1];
        check(api, ask(room.as_mut_ptr().cast(), room.len() as u64, &mut needed))?;
        if needed < room.len() as u64 {
            room.truncate(needed as usize);
            return Ok(String::from_utf8_lossy(&room).into_owned());
        }
    }
}

/// An export: `ask(buf, cap, out_len)`, asked for the size, then for the bytes.
pub(crate) fn export(
    api: &Api,
    mut ask: impl FnMut(*mut std::ffi::c_void, u64, *mut u64) -> i32,
) -> Result<Vec<u8>> {
    let mut needed = 0u64;
    check(api, ask(std::ptr::null_mut(), 0, &mut needed))?;
    let mut bytes = vec![0u8; needed as usize];
    let cap = bytes.len() as u64;
    check(api, ask(bytes.as_mut_ptr().cast(), cap, &mut needed))?;
    if needed > cap {
        return Err(Error::new(
            Status::Internal,
            format!("an export said {} and then {needed}", counted(cap as usize, "byte")),
        ));
    }
    bytes.truncate(needed as usize);
    Ok(bytes)
}

/// Address of bytes for C: NULL if there are none.
pub(crate) fn address(bytes: &[u8]) -> *const std::ffi::c_void {
    if bytes.is_empty() {
        return std::ptr::null();
    }
    bytes.as_ptr().cast()
}
