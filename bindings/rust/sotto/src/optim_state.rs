//! State of optimizers: saved, resumed, streamed, imported from DeepSpeed's checkpoints.

use std::any::Any;
use std::ffi::c_void;
use std::io::{Read, Seek, SeekFrom, Write};
use std::panic::resume_unwind;

use sotto_sys as sys;

use crate::callback;
use crate::codec::StateMode;
use crate::error::{Error, Result, Status};
use crate::library::{self, address, c_text};
use crate::optimizer::Optimizer;
use crate::tensor::Tensor;

/// A reader or writer of the caller's, and how it has failed.
struct Stream<F> {
    file: F,
    error: Option<std::io::Error>,
    panic: Option<Box<dyn Any + Send>>,
}

impl<F> Stream<F> {
    fn new(file: F) -> Stream<F> {
        Stream { file, error: None, panic: None }
    }

    /// Runs a callback's body; the code for C.
    fn run(&mut self, body: impl FnOnce(&mut F) -> std::io::Result<()>) -> i32 {
        let Stream { file, error, panic } = self;
        match callback::run(|| body(file)) {
            Ok(Ok(())) => return 0,
            Ok(Err(failed)) => *error = Some(failed),
            Err(panicked) => *panic = Some(panicked),
        }
        1
    }

    /// The result of a call of the library that used the stream; a panic goes on here.
    fn end(self, what: &str, result: Result<()>) -> Result<()> {
        if let Some(panic) = self.panic {
            resume_unwind(panic);
        }
        match self.error {
            Some(error) => Err(Error::new(Status::Cancelled, format!("{what} failed: {error}"))),
            None => result,
        }
    }
}

/// # Safety
/// Called by the library: `user` is a `Stream<W>`, `data` has `bytes` bytes.
unsafe extern "C" fn run_write<W: Write>(
    user: *mut c_void,
    data: *const c_void,
    bytes: u64,
) -> i32 {
    let data = std::slice::from_raw_parts(data.cast::<u8>(), bytes as usize);
    (*user.cast::<Stream<W>>()).run(|file| file.write_all(data))
}

/// A reader and where the state begins in it.
struct Place<R> {
    file: R,
    begin: u64,
}

/// # Safety
/// Called by the library: `user` is a `Stream<Place<R>>`, `data` has room for `bytes` bytes.
unsafe extern "C" fn run_read<R: Read + Seek>(
    user: *mut c_void,
    offset: u64,
    data: *mut c_void,
    bytes: u64,
) -> i32 {
    std::ptr::write_bytes(data.cast::<u8>(), 0, bytes as usize);
    let data = std::slice::from_raw_parts_mut(data.cast::<u8>(), bytes as usize);
    (*user.cast::<Stream<Place<R>>>()).run(|place| {
        place.file.seek(SeekFrom::Start(place.begin + offset))?;
        place.file.read_exact(data)
    })
}

impl Optimizer {
    /// This rank's state, parameters included; changes nothing. `Mean` and `Reset` are collective
    /// for types that have error feedback on several ranks. Errors: `Busy`, the comm's own.
    pub fn export_state(&mut self, mode: StateMode) -> Result<Vec<u8>> {
        let api = self.inner.api();
        let _one = self.inner.parts().comm.locked()?;
        library::export(api, |buf, cap, len| unsafe {
            (api.sotto_optim_state_export)(self.inner.raw(), mode.code(), buf, cap, len)
        })
    }

    /// Replaces this rank's state, parameters and model copies included, by that of an export in
    /// the same mode; nothing changes on error. Errors: `InvalidArgument` (damaged; of other
    /// tensors, algorithm, ranks), `Busy`, `Unsupported` (newer format).
    pub fn import_state(&mut self, mode: StateMode, state: &[u8]) -> Result<()> {
        self.inner.memory_mut()?;
        self.inner.call(|api, raw| unsafe {
            let n = state.len() as u64;
            (api.sotto_optim_state_import)(raw, mode.code(), address(state), n)
        })
    }

    /// Writes what [`export_state`](Optimizer::export_state) gives, in parts of at most 1 MiB.
    /// Errors: as there, `Cancelled` (the writer's error, in the text). A panic of the writer goes
    /// on after the call has ended.
    pub fn write_state(&mut self, mode: StateMode, file: &mut impl Write) -> Result<()> {
        fn function<W: Write>(_: &W) -> sys::sotto_write_fn {
            Some(run_write::<W>)
        }
        let write = function(&file);
        let mut stream = Stream::new(file);
        let user = &mut stream as *mut Stream<_>;
        let result = self.inner.call(|api, raw| unsafe {
            (api.sotto_optim_state_write)(raw, mode.code(), write, user.cast())
        });
        stream.end("write", result)
    }

    /// Imports a state from where a reader is to its end, in parts; it is read more than once.
    /// Nothing changes on error, unless it can be read once and not again: then steps are refused
    /// until another import. Errors: as [`import_state`](Optimizer::import_state), `Cancelled` (the
    /// reader's error, in the text).
    pub fn read_state(&mut self, mode: StateMode, file: &mut (impl Read + Seek)) -> Result<()> {
        fn function<R: Read + Seek>(_: &R) -> sys::sotto_read_fn {
            Some(run_read::<R>)
        }
        self.inner.memory_mut()?;
        let (begin, end) = extent(file)
            .map_err(|error| Error::new(Status::Cancelled, format!("seek failed: {error}")))?;
        let read = function(&file);
        let mut stream = Stream::new(Place { file, begin });
        let user = &mut stream as *mut Stream<_>;
        let result = self.inner.call(|api, raw| unsafe {
            (api.sotto_optim_state_read)(raw, mode.code(), read, user.cast(), end - begin)
        });
        stream.end("read", result)
    }

    /// Replaces the state by arrays of a DeepSpeed checkpoint, by their names:
    /// `"<parameter>/<key>"`, as `sotto_optim_state_import_arrays` has them. Collective: every rank
    /// gives the same. Nothing changes on error, on any rank. Errors: `InvalidArgument` (names the
    /// array), `Unsupported`, `Busy`, `Protocol`, the comm's own.
    pub fn import_arrays(&mut self, arrays: &[(&str, &Tensor)]) -> Result<()> {
        self.inner.memory_mut()?;
        let names = arrays.iter().map(|(name, _)| c_text("the name of an array", name));
        let names = names.collect::<Result<Vec<_>>>()?;
        let structs: Vec<_> = arrays
            .iter()
            .zip(&names)
            .map(|((_, values), name)| sys::sotto_named_array {
                name: name.as_ptr(),
                values: values.view(),
                ..Default::default()
            })
            .collect();
        self.inner.call(|api, raw| unsafe {
            let n = structs.len() as u64;
            (api.sotto_optim_state_import_arrays)(raw, structs.as_ptr(), n)
        })
    }
}

fn extent(file: &mut impl Seek) -> std::io::Result<(u64, u64)> {
    let begin = file.stream_position()?;
    let end = file.seek(SeekFrom::End(0))?;
    Ok((begin, end.max(begin)))
}
