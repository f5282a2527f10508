//! The C interface of libsotto: constants, layouts and signatures of `sotto.h`, and a loader.
//!
//! Functions are members of [`Api`]. [`Api::load`] takes them from a library that was loaded while
//! the program runs ([`Library`]); with the feature `link` the program is linked with libsotto, and
//! `Api::linked` or the symbols in `linked` are the same functions. `build.rs` looks for it in
//! `SOTTO_LIB_DIR`, then asks pkg-config.
//!
//! The declarations are written by hand and held against the header's snapshot by
//! `bindings/abi_check.py`. What a function does, which errors it gives and who owns what is told
//! in the C header. The crate `sotto` has a safe interface.

#![no_std]
#![allow(non_camel_case_types)]

#[cfg(test)]
extern crate std;

mod constants;
mod dl;
mod functions;
mod types;

pub use constants::*;
pub use dl::{last_error, Library};
pub use functions::*;
pub use types::*;
