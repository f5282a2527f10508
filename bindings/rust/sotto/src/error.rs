//! Errors: a status and the library's own text.

use std::fmt;

use sotto_sys as sys;

/// What kind of error a call or an operation has ended with.
///
/// What to do: mend the program (`InvalidArgument`, `InvalidState`, `Unsupported`); free something
/// and try again (`OutOfMemory`, `Busy`); make a new group and resume (`Timeout`, `PeerLost`,
/// `Aborted`, `Protocol`, `Transport`, `Device`); go on, since nothing was updated and the group is
/// healthy (`Nonfinite`, `Cancelled`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// A caller's mistake: the text says what was found and what is allowed.
    InvalidArgument,
    /// Calls in the wrong order, or a handle of a parent process.
    InvalidState,
    /// Unknown or not built in; the text names it.
    Unsupported,
    /// Memory ran out; nothing has changed.
    OutOfMemory,
    /// A local resource is in use: wait for the operation that uses it.
    Busy,
    /// An operation stood still for longer than its deadline; the group has failed.
    Timeout,
    /// Another rank is gone; the group has failed.
    PeerLost,
    /// A rank has aborted the group; the text is its reason.
    Aborted,
    /// Ranks called different things, or a message is damaged.
    Protocol,
    /// The local network failed.
    Transport,
    /// The local device failed.
    Device,
    /// A fault of the library.
    Internal,
    /// NaN or Inf in what was given: nothing was updated, the group is healthy.
    Nonfinite,
    /// Withdrawn by a rank or the caller: the group is healthy.
    Cancelled,
    /// The shared library was not found, or is not one that this crate can work with. No code of C.
    LibraryLoad,
    /// A code that this crate does not know.
    Unknown(i32),
}

/// Every status that has a code, with it and the library's name for it.
const CODES: [(Status, i32, &str); 14] = [
    (Status::InvalidArgument, sys::SOTTO_E_INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    (Status::InvalidState, sys::SOTTO_E_INVALID_STATE, "INVALID_STATE"),
    (Status::Unsupported, sys::SOTTO_E_UNSUPPORTED, "UNSUPPORTED"),
    (Status::OutOfMemory, sys::SOTTO_E_OUT_OF_MEMORY, "OUT_OF_MEMORY"),
    (Status::Busy, sys::SOTTO_E_BUSY, "BUSY"),
    (Status::Timeout, sys::SOTTO_E_TIMEOUT, "TIMEOUT"),
    (Status::PeerLost, sys::SOTTO_E_PEER_LOST, "PEER_LOST"),
    (Status::Aborted, sys::SOTTO_E_ABORTED, "ABORTED"),
    (Status::Protocol, sys::SOTTO_E_PROTOCOL, "PROTOCOL"),
    (Status::Transport, sys::SOTTO_E_TRANSPORT, "TRANSPORT"),
    (Status::Device, sys::SOTTO_E_DEVICE, "DEVICE"),
    (Status::Internal, sys::SOTTO_E_INTERNAL, "INTERNAL"),
    (Status::Nonfinite, sys::SOTTO_E_NONFINITE, "NONFINITE"),
    (Status::Cancelled, sys::SOTTO_E_CANCELLED, "CANCELLED"),
];

impl Status {
    /// The status of a code of C below zero.
    pub fn from_code(code: i32) -> Status {
        let known = CODES.iter().find(|known| known.1 == code);
        known.map_or(Status::Unknown(code), |known| known.0)
    }

    /// The code of C; `None` for `LibraryLoad`.
    pub fn code(self) -> Option<i32> {
        match self {
            Status::Unknown(code) => Some(code),
            _ => CODES.iter().find(|known| known.0 == self).map(|known| known.1),
        }
    }

    /// The library's name: "PEER_LOST".
    pub fn name(self) -> &'static str {
        match self {
            Status::LibraryLoad => "LIBRARY_LOAD",
            _ => CODES.iter().find(|known| known.0 == self).map_or("UNKNOWN", |known| known.2),
        }
    }
}

/// What a call or an operation has ended with: a status, and a text that names ranks, operations,
/// addresses and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind of error.
    pub status: Status,
    /// What was found and what is allowed, in words.
    pub text: String,
}

impl Error {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Error {
        Error { status, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Error {
        Error::new(Status::InvalidArgument, text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.name(), self.text)
    }
}

impl std::error::Error for Error {}

/// The result of what may fail with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
