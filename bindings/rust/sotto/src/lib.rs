//! Compressed collectives and optimizers for distributed training: `libsotto.so`, safely.
//!
//! One rank has a [`Context`] and a [`Comm`]. Collectives return an [`Op`], which owns its buffers
//! and gives them back; optimizers ([`Optimizer`], [`Outer`]) and [`Overlap`]s own the memory that
//! steps work on. What breaks the rules of the C interface does not compile, or is an [`Error`]
//! with a [`Status`] and the library's text.
//!
//! ```no_run
//! use sotto::Reduce;
//!
//! # fn main() -> sotto::Result<()> {
//! let comm = sotto::init()?; // under sotto-run, torchrun, mpirun or srun
//! let op = comm.all_reduce(vec![1.0f32; 1000], Reduce::Mean)?;
//! let mean = op.wait()?; // the same Vec
//! # assert_eq!(mean.len(), 1000);
//! # Ok(())
//! # }
//! ```
//!
//! The shared library is loaded on first use: the file that `SOTTO_LIBRARY` names (and then no
//! other), else the one beside the program or in `../lib`, else the system's. With the feature
//! `link` the program is linked with it.
//!
//! - Every wait has a deadline: that of the call, else of the comm ([`CommOptions::timeout`]).
//! - Dropping never waits for an operation: what is in flight goes on, and its memory is freed by a
//!   later call, after it has ended. (An [`Outer`], or an [`Optimizer`] with outer steps, waits for
//!   the average under way, at most its deadline; on a thread of its own if a later call frees it.)
//!   `std::mem::forget` is safe everywhere.
//! - Callbacks (`on_done`, log sinks, readers, writers, all-gathers) may panic; nothing unwinds
//!   into C. What they drop is given back later.
//! - A forked child cannot use what its parent has made: `InvalidState`.

#![warn(missing_docs)]

mod buffers;
mod call;
mod callback;
mod codec;
mod collective;
mod comm;
mod context;
mod element;
mod error;
mod find;
mod group;
mod interrupt;
mod left;
mod library;
mod log;
mod op;
mod optim_state;
mod optimizer;
mod outer;
mod overlap;
mod owner;
mod params;
mod registered;
mod reports;
mod step_overlap;
mod tensor;
mod text;

pub use buffers::{Source, Target, Views};
pub use call::{Call, Reduce, PRIORITY_BACKGROUND};
pub use codec::{Codec, StateMode};
pub use collective::{Collective, Parts};
pub use comm::{Comm, CommOptions, Counters};
pub use context::{Context, ContextOptions, UniqueId};
pub use element::{Bf16, Dtype, Element, F16};
pub use error::{Error, Result, Status};
pub use group::{Collected, Group, Ticket};
pub use interrupt::interruptible;
#[doc(hidden)]
pub use left::left_behind;
pub use log::{log_to_stderr, set_log, Level};
pub use op::{wait_all, wait_any, Op, OpStats, Pending};
pub use optimizer::{OptimInfo, Optimizer, Recorded};
pub use outer::{events, Outer, OuterInfo, OuterSteps};
pub use overlap::{Gradient, Overlap, OverlapInfo, Round};
pub use params::Param;
pub use registered::Step;
pub use reports::{
    abi_version, build_info, config_report, config_resolve, library_version, predict_report,
    status_name,
};
pub use sotto_sys as sys;
pub use tensor::{Device, Tensor};

/// A comm of all ranks that the launcher has started, with defaults: under sotto-run, torchrun,
/// Open MPI, MPICH or Slurm. Errors: as [`Context::new`] and [`Comm::new`].
pub fn init() -> Result<Comm> {
    Comm::new(&Context::new()?, CommOptions::from_env())
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
