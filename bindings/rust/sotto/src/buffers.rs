//! What operations read and write, and own meanwhile.

use std::ptr::NonNull;
use std::sync::Arc;

use sotto_sys as sys;

use crate::element::Element;
use crate::tensor::Tensor;

/// Views of memory, in the order in which they are handed to the library.
#[derive(Clone, Debug, Default)]
pub struct Views(pub(crate) Vec<sys::sotto_buffer>);

impl Views {
    /// Rank r's piece of each view, of `size` equal ones.
    pub(crate) fn parts(&self, rank: u32, size: u32) -> Views {
        let part = |whole: &sys::sotto_buffer| {
            let count = whole.count / u64::from(size);
            let bytes = u64::from(whole.dtype >> 8 & 0xff) / 8;
            let offset = (u64::from(rank) * count * bytes) as usize;
            let data = whole.data.cast::<u8>().wrapping_add(offset).cast();
            sys::sotto_buffer { data, count, ..*whole }
        };
        Views(self.0.iter().map(part).collect())
    }

    fn elements<T: Element>(&mut self, data: *const T, count: usize) {
        self.0.push(sys::sotto_buffer {
            data: data as *mut _,
            count: count as u64,
            dtype: T::DTYPE.code(),
            device_type: sys::SOTTO_DEVICE_CPU,
            ..Default::default()
        });
    }
}

/// A value on the heap that is moved as a pointer alone: views of it stay valid, and no reference
/// to it comes into being while an operation uses it.
pub(crate) struct Kept<B>(NonNull<B>);

// Owns the value, as a Box does.
unsafe impl<B: Send> Send for Kept<B> {}
unsafe impl<B: Sync> Sync for Kept<B> {}

impl<B> Kept<B> {
    pub(crate) fn new(value: B) -> Kept<B> {
        let raw = Box::into_raw(Box::new(value));
        Kept(NonNull::new(raw).expect("a box is not NULL"))
    }

    /// Before an operation uses it.
    pub(crate) fn get_mut(&mut self) -> &mut B {
        unsafe { self.0.as_mut() }
    }

    /// When no operation uses it any more.
    pub(crate) fn into_inner(self) -> B {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        *unsafe { Box::from_raw(raw) }
    }
}

impl<B> Drop for Kept<B> {
    fn drop(&mut self) {
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What an operation may read: `Vec`, `Box<[T]>` or array of elements, [`Tensor`], `Arc` of a `Vec`
/// or slice, a `Vec` of those, or a tuple of different ones. All of them are one operation.
///
/// # Safety
/// The memory of the views is valid, and nothing else writes it, as long as the value is neither
/// moved, changed nor dropped.
pub unsafe trait Source: Send + 'static {
    /// Adds views for reading.
    fn read(&self, views: &mut Views);
}

/// What an operation may write as well: all [`Source`]s but `Arc`s.
///
/// # Safety
/// As [`Source`], and nothing else reads or writes the memory.
pub unsafe trait Target: Source {
    /// Adds views for reading and writing.
    fn write(&mut self, views: &mut Views);
}

macro_rules! of_elements {
    ($($(const $n:ident)? $kind:ty),* $(,)?) => {$(
        unsafe impl<T: Element $(, const $n: usize)?> Source for $kind {
            fn read(&self, views: &mut Views) {
                views.elements(self.as_ptr(), self.len());
            }
        }

        unsafe impl<T: Element $(, const $n: usize)?> Target for $kind {
            fn write(&mut self, views: &mut Views) {
                views.elements(self.as_mut_ptr(), self.len());
            }
        }

        unsafe impl<T: Element $(, const $n: usize)?> Source for Vec<$kind> {
            fn read(&self, views: &mut Views) {
                self.iter().for_each(|one| one.read(views));
            }
        }

        unsafe impl<T: Element $(, const $n: usize)?> Target for Vec<$kind> {
            fn write(&mut self, views: &mut Views) {
                self.iter_mut().for_each(|one| one.write(views));
            }
        }
    )*};
}

of_elements! { Vec<T>, Box<[T]>, const N [T; N] }

unsafe impl<T: Element> Source for Arc<[T]> {
    fn read(&self, views: &mut Views) {
        views.elements(self.as_ptr(), self.len());
    }
}

unsafe impl<T: Element> Source for Arc<Vec<T>> {
    fn read(&self, views: &mut Views) {
        views.elements(self.as_ptr(), self.len());
    }
}

unsafe impl Source for Tensor {
    fn read(&self, views: &mut Views) {
        views.0.push(self.view());
    }
}

unsafe impl Target for Tensor {
    fn write(&mut self, views: &mut Views) {
        self.read(views);
    }
}

unsafe impl Source for Vec<Tensor> {
    fn read(&self, views: &mut Views) {
        self.iter().for_each(|one| one.read(views));
    }
}

unsafe impl Target for Vec<Tensor> {
    fn write(&mut self, views: &mut Views) {
        self.read(views);
    }
}

macro_rules! tuples {
    ($($($name:ident $at:tt),*;)*) => {$(
        unsafe impl<$($name: Source),*> Source for ($($name,)*) {
            fn read(&self, views: &mut Views) {
                $(self.$at.read(views);)*
            }
        }

        unsafe impl<$($name: Target),*> Target for ($($name,)*) {
            fn write(&mut self, views: &mut Views) {
                $(self.$at.write(views);)*
            }
        }
    )*};
}

tuples! {
    A 0, B 1;
    A 0, B 1, C 2;
    A 0, B 1, C 2, D 3;
}
