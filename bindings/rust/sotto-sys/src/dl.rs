//! Shared libraries by the system's loader.

use core::ffi::c_void;
use core::ptr::NonNull;

use crate::types::c_char;

extern "C" {
    fn dlopen(path: *const c_char, flags: i32) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlclose(library: *mut c_void) -> i32;
    fn dlerror() -> *const c_char;
}

// glibc before 2.34 has these functions in a library of their own.
#[cfg_attr(target_os = "linux", link(name = "dl"))]
extern "C" {}

const RTLD_NOW: i32 = 2; // RTLD_LOCAL is 0

/// A library that the system's loader has loaded, with symbols that no other library sees.
#[derive(Debug)]
pub struct Library(NonNull<c_void>);

// The loader's functions may be called on any thread.
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

impl Library {
    /// Loads the library that `path` names, with a final zero byte: a file if there is a `/` in it,
    /// else where the system's loader looks. `None`: [`last_error`] says why.
    ///
    /// # Safety
    /// Initialisers of the library run.
    pub unsafe fn open(path: &[u8]) -> Option<Library> {
        assert_eq!(path.last(), Some(&0), "the path ends with a zero byte");
        NonNull::new(dlopen(path.as_ptr().cast(), RTLD_NOW)).map(Library)
    }

    /// Address of a function by its name with a final zero byte, or NULL.
    pub fn find(&self, name: &[u8]) -> *mut c_void {
        assert_eq!(name.last(), Some(&0), "the name ends with a zero byte");
        unsafe { dlsym(self.0.as_ptr(), name.as_ptr().cast()) }
    }

    /// Unloads the library.
    ///
    /// # Safety
    /// None of its functions is used any more.
    pub unsafe fn close(self) {
        dlclose(self.0.as_ptr());
    }
}

/// Text of this thread's last call of the loader that failed, or NULL. Ends with a zero byte and
/// lives until this thread's next call.
pub fn last_error() -> *const c_char {
    unsafe { dlerror() }
}
