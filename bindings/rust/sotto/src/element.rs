//! Element types of buffers.

use sotto_sys as sys;

/// What the elements of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Dtype {
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Float16,
    Float32,
    Float64,
    Bfloat16,
}

impl Dtype {
    /// The number of C: DLPack's code, bits and lanes.
    pub fn code(self) -> u32 {
        match self {
            Dtype::Int8 => sys::SOTTO_INT8,
            Dtype::Int16 => sys::SOTTO_INT16,
            Dtype::Int32 => sys::SOTTO_INT32,
            Dtype::Int64 => sys::SOTTO_INT64,
            Dtype::Uint8 => sys::SOTTO_UINT8,
            Dtype::Uint16 => sys::SOTTO_UINT16,
            Dtype::Uint32 => sys::SOTTO_UINT32,
            Dtype::Uint64 => sys::SOTTO_UINT64,
            Dtype::Float16 => sys::SOTTO_FLOAT16,
            Dtype::Float32 => sys::SOTTO_FLOAT32,
            Dtype::Float64 => sys::SOTTO_FLOAT64,
            Dtype::Bfloat16 => sys::SOTTO_BFLOAT16,
        }
    }
}

/// The bits of an IEEE 754 half-precision number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16: the upper half of a 32-bit float.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Bf16(pub u16);

mod sealed {
    pub trait Sealed {}
}

/// A type that buffers may have elements of: integers of 8 to 64 bits, [`F16`], [`Bf16`], `f32`,
/// `f64`. All patterns of bits are values.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The library's name for the type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($kind:ty: $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $kind {}
        impl Element for $kind {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

elements! {
    i8: Int8, i16: Int16, i32: Int32, i64: Int64, u8: Uint8, u16: Uint16, u32: Uint32, u64: Uint64,
    F16: Float16, f32: Float32, f64: Float64, Bf16: Bfloat16,
}
