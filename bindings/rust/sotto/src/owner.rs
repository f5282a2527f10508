//! Handles that are destroyed with their owner.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use sotto_sys::Api;

use crate::callback;
use crate::error::Result;
use crate::left;
use crate::library::check;

type Destroy<T> = unsafe extern "C" fn(*mut T) -> i32;

/// One handle of the library and what destroys it.
pub(crate) struct Owner<T: 'static> {
    pub(crate) api: &'static Api,
    raw: NonNull<T>,
    destroy: Destroy<T>,
    destroyed: AtomicBool,
}

// Handles may be used on any thread, one at a time; who holds an Owner sees to that.
unsafe impl<T> Send for Owner<T> {}
unsafe impl<T> Sync for Owner<T> {}

impl<T> Owner<T> {
    /// Takes what `make(out)` makes. `None`: it made no handle, and that was no error.
    pub(crate) fn maybe(
        api: &'static Api,
        destroy: Destroy<T>,
        make: impl FnOnce(*mut *mut T) -> i32,
    ) -> Result<Option<Owner<T>>> {
        left::reap();
        let mut raw = std::ptr::null_mut();
        check(api, make(&mut raw))?;
        Ok(NonNull::new(raw).map(|raw| Owner {
            api,
            raw,
            destroy,
            destroyed: AtomicBool::new(false),
        }))
    }

    /// Takes what `make(out)` makes.
    pub(crate) fn make(
        api: &'static Api,
        destroy: Destroy<T>,
        make: impl FnOnce(*mut *mut T) -> i32,
    ) -> Result<Owner<T>> {
        Ok(Self::maybe(api, destroy, make)?.expect("a call that returns OK makes a handle"))
    }

    pub(crate) fn raw(&self) -> *mut T {
        self.raw.as_ptr()
    }

    /// Destroys the handle now, once. Errors: what the library meets meanwhile. Inside a callback
    /// it refuses, and the handle is destroyed later.
    pub(crate) fn close(&self) -> Result<()> {
        let already = self.destroyed.load(Ordering::Acquire);
        if !already && !callback::inside() {
            self.destroyed.store(true, Ordering::Release);
        }
        check(self.api, unsafe { (self.destroy)(self.raw()) })
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        if *self.destroyed.get_mut() {
            return;
        }
        if callback::inside() {
            let destroyed = AtomicBool::new(false);
            left::keep_what_waits(None, Box::new(Owner { destroyed, ..*self }));
        } else {
            unsafe { (self.destroy)(self.raw()) };
        }
    }
}
