//! Memory of any element type that stays where it is.

use std::ffi::c_void;
use std::fmt;
use std::ptr::slice_from_raw_parts_mut;
use std::slice;

use sotto_sys as sys;

use crate::element::{Dtype, Element};
use crate::error::{Error, Result};

/// Where the memory of a lent tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// Memory of the CUDA device with this number.
    Cuda(i32),
    /// Host memory that CUDA has pinned.
    CudaHost,
}

/// Contiguous elements whose type is known while the program runs: owned, or lent.
///
/// Moving a tensor does not move its elements. Made of a `Vec` with [`From`]; [`Tensor::into_vec`]
/// is the way back.
pub struct Tensor {
    view: sys::sotto_buffer,
    dtype: Option<Dtype>,
    free: Option<unsafe fn(*mut c_void, usize)>,
}

// Elements are plain numbers; lent memory is the caller's promise.
unsafe impl Send for Tensor {}
unsafe impl Sync for Tensor {}

unsafe fn free<T>(data: *mut c_void, count: usize) {
    drop(Box::from_raw(slice_from_raw_parts_mut(data.cast::<T>(), count)));
}

impl<T: Element> From<Vec<T>> for Tensor {
    fn from(elements: Vec<T>) -> Tensor {
        let count = elements.len();
        let data = Box::into_raw(elements.into_boxed_slice());
        let mut tensor = Tensor::host(data.cast(), count, T::DTYPE);
        tensor.free = Some(free::<T>);
        tensor
    }
}

impl Tensor {
    /// `count` zeros of an element type.
    pub fn zeros<T: Element>(count: usize) -> Tensor {
        Tensor::from(vec![T::default(); count])
    }

    fn host(data: *mut c_void, count: usize, dtype: Dtype) -> Tensor {
        let view = sys::sotto_buffer {
            data,
            count: count as u64,
            dtype: dtype.code(),
            device_type: sys::SOTTO_DEVICE_CPU,
            ..Default::default()
        };
        Tensor { view, dtype: Some(dtype), free: None }
    }

    /// Memory that somebody else owns, in place of a borrow.
    ///
    /// # Safety
    /// The elements stay alive, and are touched by nobody else, from the first call that gets the
    /// tensor until its operation has completed; of an optimizer, an outer optimizer or an overlap
    /// until that is closed and none of its steps is in flight. Dropping an operation does not end
    /// it.
    pub unsafe fn lent<T: Element>(elements: &mut [T]) -> Tensor {
        Tensor::host(elements.as_mut_ptr().cast(), elements.len(), T::DTYPE)
    }

    /// As [`Tensor::lent`], of any place: `count` elements from `data` on, on `device`.
    ///
    /// # Safety
    /// As [`Tensor::lent`]. `data` leads to `count` elements of `dtype` on `device`.
    pub unsafe fn lent_at(data: *mut c_void, count: usize, dtype: Dtype, device: Device) -> Tensor {
        let mut tensor = Tensor::host(data, count, dtype);
        let (kind, id) = match device {
            Device::Cpu => (sys::SOTTO_DEVICE_CPU, 0),
            Device::Cuda(id) => (sys::SOTTO_DEVICE_CUDA, id),
            Device::CudaHost => (sys::SOTTO_DEVICE_CUDA_HOST, 0),
        };
        tensor.view.device_type = kind;
        tensor.view.device_id = id;
        tensor
    }

    /// Only a count and an element type: for gradients that lie elsewhere in every round.
    pub(crate) fn nowhere(count: usize, dtype: Dtype) -> Tensor {
        let mut tensor = Tensor::host(std::ptr::null_mut(), count, dtype);
        tensor.dtype = None;
        tensor
    }

    /// The same memory once more, not owned. Who has it sees to it that only one is used.
    pub(crate) fn alias(&self) -> Tensor {
        Tensor { view: self.view, dtype: self.dtype, free: None }
    }

    pub(crate) fn view(&self) -> sys::sotto_buffer {
        self.view
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.view.count as usize
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn check<T: Element>(&self) -> Result<()> {
        if self.view.device_type == sys::SOTTO_DEVICE_CUDA {
            return Err(Error::argument("the tensor is in device memory, which has no slice"));
        }
        if self.dtype != Some(T::DTYPE) {
            return Err(Error::argument(match self.dtype {
                Some(dtype) => format!("the tensor is of {dtype:?}, not of {:?}", T::DTYPE),
                None => "the tensor has no memory in this round".to_string(),
            }));
        }
        Ok(())
    }

    /// The elements. Errors: `InvalidArgument` (of another type, in device memory).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        if self.is_empty() {
            return Ok(&[]); // lent memory of no elements may be anywhere
        }
        Ok(unsafe { slice::from_raw_parts(self.view.data.cast(), self.len()) })
    }

    /// The elements, to be changed. Errors: as [`Tensor::as_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        if self.is_empty() {
            return Ok(&mut []);
        }
        Ok(unsafe { slice::from_raw_parts_mut(self.view.data.cast(), self.len()) })
    }

    /// The elements as a `Vec`, without a copy; a copy of lent ones. Errors: as
    /// [`Tensor::as_slice`].
    pub fn into_vec<T: Element>(mut self) -> Result<Vec<T>> {
        self.check::<T>()?;
        if self.free.take().is_none() {
            return Ok(self.as_slice()?.to_vec());
        }
        let elements = slice_from_raw_parts_mut(self.view.data.cast::<T>(), self.len());
        Ok(unsafe { Box::from_raw(elements) }.into_vec())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let Some(free) = self.free {
            unsafe { free(self.view.data, self.len()) };
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.free.is_some() { "owned" } else { "lent" };
        write!(f, "Tensor({how}, {} of dtype {:#x})", self.len(), self.view.dtype)
    }
}
