//! Finds, loads and checks the shared library; texts and errors of its calls.
//!
//! The first that is there: the file that `SOTTO_LIBRARY` names (and then no other), the one that
//! lies beside the program (in its folder, or in `../lib`), the system's. It is loaded on first
//! use, with local symbols, once per process.

use std::ffi::{CStr, CString};
use std::os::raw::c_char;
use std::path::Path;
use std::sync::Mutex;

use sotto_sys as sys;
use sys::Api;

use crate::error::{Error, Result, Status};

static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);

/// The library, loaded on the first call.
pub(crate) fn api() -> Result<&'static Api> {
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if loaded.is_none() {
        *loaded = Some(Box::leak(Box::new(find()?)));
    }
    Ok(loaded.expect("was just loaded"))
}

fn refused(text: String) -> Error {
    Error::new(Status::LibraryLoad, text)
}

/// Both numbers in the text: the library's, and the one that the declarations have.
fn check_version(place: &str, found: u32) -> Result<()> {
    let (major, minor) = (found >> 16, found & 0xffff);
    if major == sys::SOTTO_ABI_MAJOR && minor >= sys::SOTTO_ABI_MINOR {
        return Ok(());
    }
    Err(refused(format!(
        "{place}: has ABI {major}.{minor}, this crate was written for {}.{}; the major version has \
         to be equal and the library's minor version not lower",
        sys::SOTTO_ABI_MAJOR,
        sys::SOTTO_ABI_MINOR
    )))
}

#[cfg(feature = "link")]
fn find() -> Result<Api> {
    let api = Api::linked();
    check_version("the linked library", unsafe { (api.sotto_abi_version)() })?;
    Ok(api)
}

#[cfg(not(feature = "link"))]
fn find() -> Result<Api> {
    let soname = format!("libsotto.so.{}", sys::SOTTO_ABI_MAJOR);
    if let Some(named) = std::env::var_os("SOTTO_LIBRARY").filter(|named| !named.is_empty()) {
        return load(Path::new(&named))
            .map_err(|error| refused(format!("SOTTO_LIBRARY is set: {}", error.text)));
    }
    let beside = beside_the_program(&soname);
    if let Some(file) = beside.iter().find(|file| file.exists()) {
        return load(file);
    }
    load(Path::new(&soname)).map_err(|error| {
        let places: Vec<_> = beside.iter().map(|file| file.display().to_string()).collect();
        refused(format!(
            "libsotto was not found. Looked for: the file that the environment variable \
             SOTTO_LIBRARY names (not set), {} (absent), and {soname} where the system's loader \
             looks: {}",
            places.join(" and "),
            error.text
        ))
    })
}

#[cfg(not(feature = "link"))]
fn beside_the_program(soname: &str) -> Vec<std::path::PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or_else(|| Path::new(""));
    vec![folder.join(soname), folder.join("../lib").join(soname)]
}

#[cfg(not(feature = "link"))]
fn load(path: &Path) -> Result<Api> {
    use std::os::unix::ffi::OsStrExt;

    let place = path.display().to_string();
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| refused(format!("{place}: the path has a zero byte")))?;
    // The library's initialisers are those of any shared library that a program is linked with.
    let library = unsafe { sys::Library::open(name.as_bytes_with_nul()) }.ok_or_else(|| {
        let reason = unsafe { text_of(sys::last_error()) };
        refused(format!("{place}: cannot be loaded: {reason}"))
    })?;
    let taken = unsafe { take(&library, &place) };
    if taken.is_err() {
        unsafe { library.close() };
    }
    taken
}

/// The functions of a library that was just opened.
///
/// # Safety
/// Functions with the library's names have this ABI if its version is right.
#[cfg(not(feature = "link"))]
unsafe fn take(library: &sys::Library, place: &str) -> Result<Api> {
    let version = library.find(b"sotto_abi_version\0");
    if version.is_null() {
        return Err(refused(format!(
            "{place}: has no function sotto_abi_version, so it is not libsotto"
        )));
    }
    let version: unsafe extern "C" fn() -> u32 = std::mem::transmute(version);
    check_version(place, version())?;
    Api::load(|name| library.find(name)).map_err(|missing| {
        refused(format!(
            "{place}: has no function {missing}, which ABI {}.{} has",
            sys::SOTTO_ABI_MAJOR,
            sys::SOTTO_ABI_MINOR
        ))
    })
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
            format!("an export said {cap} bytes and then {needed}"),
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
