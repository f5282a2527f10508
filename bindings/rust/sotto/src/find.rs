//! Finds, loads and checks the shared library.
//!
//! The first that is there: the file that `SOTTO_LIBRARY` names (and then no other), the one that
//! lies beside the program (in its folder, or in `../lib`), the system's. Its symbols are local. With
//! the feature `link` it is the one that the program is linked with.

use sotto_sys as sys;
use sys::Api;

use crate::error::{Error, Result, Status};

#[cfg(not(feature = "link"))]
pub(crate) use running::find;

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

/// The library of this program.
#[cfg(feature = "link")]
pub(crate) fn find() -> Result<Api> {
    let api = Api::linked();
    check_version("the linked library", unsafe { (api.sotto_abi_version)() })?;
    Ok(api)
}

#[cfg(not(feature = "link"))]
mod running {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Path, PathBuf};

    use super::{check_version, refused, sys, Api, Result};
    use crate::library::text_of;

    /// The library of this program.
    pub(crate) fn find() -> Result<Api> {
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

    fn beside_the_program(soname: &str) -> Vec<PathBuf> {
        let program = std::env::current_exe().ok();
        let folder = program.as_deref().and_then(Path::parent).filter(|f| f.is_absolute());
        let places = |f: &Path| vec![f.join(soname), f.join("../lib").join(soname)];
        folder.map_or(Vec::new(), places)
    }

    fn load(path: &Path) -> Result<Api> {
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
}
