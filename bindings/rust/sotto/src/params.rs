//! Parameters of optimizers, with their memory.

use std::ffi::CString;

use sotto_sys as sys;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::library::c_text;
use crate::tensor::Tensor;
use crate::text::counted;

/// One tensor of an optimizer, with its memory: all of as many elements.
pub struct Param {
    name: Option<String>,
    group: u32,
    pub(crate) param: Tensor,
    pub(crate) grad: Option<Tensor>,
    pub(crate) model_copy: Option<Tensor>,
    mask: Option<Tensor>,
}

impl Param {
    /// `param`: float32, updated in place by every step. `grad`: float32, float16 or bfloat16 (all
    /// params alike), read by steps: mean over this rank's samples, times the loss scale if there
    /// is one.
    pub fn new(param: impl Into<Tensor>, grad: impl Into<Tensor>) -> Param {
        Param { grad: Some(grad.into()), ..Param::live(param) }
    }

    /// A tensor of an outer optimizer: float32 values that inner steps change.
    pub fn live(param: impl Into<Tensor>) -> Param {
        let param = param.into();
        Param { name: None, group: 0, param, grad: None, model_copy: None, mask: None }
    }

    /// Unique; `"param<index>"` without it.
    pub fn name(mut self, name: impl Into<String>) -> Param {
        self.name = Some(name.into());
        self
    }

    /// Index into the parameter groups of the configuration.
    pub fn group(mut self, group: u32) -> Param {
        self.group = group;
        self
    }

    /// float16 or bfloat16 (all alike), written after every change of the parameter.
    pub fn model_copy(mut self, copy: impl Into<Tensor>) -> Param {
        self.model_copy = Some(copy.into());
        self
    }

    /// uint8, 0 or 1: elements with 0 take no part.
    pub fn mask(mut self, mask: impl Into<Tensor>) -> Param {
        self.mask = Some(mask.into());
        self
    }

    fn of(&self, what: &str, tensor: Option<&Tensor>) -> Result<sys::sotto_buffer> {
        let view = tensor.map(Tensor::view).unwrap_or_default();
        if tensor.is_some() && view.count != self.param.len() as u64 {
            return Err(Error::argument(format!(
                "{what} has {}, its parameter has {}",
                counted(view.count as usize, "element"),
                self.param.len()
            )));
        }
        Ok(view)
    }
}

/// The structs of C for parameters; the names live as long as they do.
pub(crate) struct CParams {
    pub(crate) structs: Vec<sys::sotto_param>,
    _names: Vec<Option<CString>>,
}

impl CParams {
    pub(crate) fn new(params: &[Param]) -> Result<CParams> {
        let (mut structs, mut names) = (Vec::new(), Vec::new());
        for (i, param) in params.iter().enumerate() {
            let what = |part: &str| format!("params[{i}].{part}");
            let name = param.name.as_ref().map(|name| c_text(&what("name"), name)).transpose()?;
            structs.push(sys::sotto_param {
                group: param.group,
                name: name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
                param: param.param.view(),
                grad: param.of(&what("grad"), param.grad.as_ref())?,
                model_copy: param.of(&what("model_copy"), param.model_copy.as_ref())?,
                mask: param.of(&what("mask"), param.mask.as_ref())?,
                ..Default::default()
            });
            names.push(name);
        }
        Ok(CParams { structs, _names: names })
    }
}

fn out_of_range(index: usize, n: usize) -> Error {
    Error::argument(format!("parameter {index} of {n}; allowed: 0 to {}", n as i64 - 1))
}

pub(crate) fn at(params: &[Param], index: usize) -> Result<&Param> {
    params.get(index).ok_or_else(|| out_of_range(index, params.len()))
}

pub(crate) fn at_mut(params: &mut [Param], index: usize) -> Result<&mut Param> {
    let n = params.len();
    params.get_mut(index).ok_or_else(|| out_of_range(index, n))
}

fn none(what: &str) -> Error {
    Error::argument(format!("the parameter has no {what}"))
}

impl Param {
    pub(crate) fn copy_slice<T: Element>(&self) -> Result<&[T]> {
        self.model_copy.as_ref().ok_or_else(|| none("model copy"))?.as_slice()
    }

    pub(crate) fn both<T: Element>(&mut self) -> Result<(&mut [f32], &mut [T])> {
        let grad = self.grad.as_mut().ok_or_else(|| none("gradient"))?;
        Ok((self.param.as_mut_slice()?, grad.as_mut_slice()?))
    }
}

/// Puts other tensors into one place of all parameters; `given` has the former ones then.
pub(crate) fn exchange(
    params: &mut [Param],
    given: &mut [Tensor],
    place: impl Fn(&mut Param) -> Option<&mut Tensor>,
) {
    for (param, other) in params.iter_mut().zip(given) {
        if let Some(tensor) = place(param) {
            std::mem::swap(tensor, other);
        }
    }
}

pub(crate) fn views(tensors: &[Tensor]) -> Vec<sys::sotto_buffer> {
    tensors.iter().map(Tensor::view).collect()
}

/// Access to the memory of parameters: `self.inner` is a `Registered` of `Vec<Param>`.
macro_rules! parameter_memory {
    ($set_params:ident) => {
        /// Number of parameters.
        pub fn len(&self) -> usize {
            self.inner.parts().memory.len()
        }

        /// Whether there are no parameters: never.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// Values of a parameter. Errors: `InvalidArgument` (index; in device memory), `Busy` (a
        /// step is in flight).
        pub fn param(&self, index: usize) -> Result<&[f32]> {
            params::at(self.inner.memory()?, index)?.param.as_slice()
        }

        /// Values of a parameter, to be changed: they have to stay equal on all ranks where the
        /// optimizer asks for that. Errors: as `param`.
        pub fn param_mut(&mut self, index: usize) -> Result<&mut [f32]> {
            params::at_mut(self.inner.memory_mut()?, index)?.param.as_mut_slice()
        }

        /// The copy of a parameter in `F16` or `Bf16`. Errors: as `param`; `InvalidArgument` (it
        /// has none, or of another type).
        pub fn model_copy<T: Element>(&self, index: usize) -> Result<&[T]> {
            params::at(self.inner.memory()?, index)?.copy_slice()
        }

        /// Says where parameters and, unless the list is empty, model copies lie from now on; both
        /// lists have the former tensors then. Nothing is copied: parameters are the values in the
        /// new place. A list of copies has one for each parameter, without elements where it has
        /// none. Errors: `InvalidArgument` (names the parameter), `Busy`; nothing changes then.
        pub fn set_params(
            &mut self,
            params: &mut [Tensor],
            model_copies: &mut [Tensor],
        ) -> Result<()> {
            self.inner.memory_mut()?;
            if !model_copies.is_empty() && model_copies.len() != params.len() {
                return Err(Error::argument(format!(
                    "model_copies has {} for {}; give one for each, or none",
                    counted(model_copies.len(), "tensor"),
                    counted(params.len(), "parameter")
                )));
            }
            let (live, copies) = (params::views(params), params::views(model_copies));
            let given = if copies.is_empty() { std::ptr::null() } else { copies.as_ptr() };
            self.inner.call(|api, raw| unsafe {
                (api.$set_params)(raw, live.as_ptr(), given, live.len() as u64)
            })?;
            let memory = self.inner.memory_mut()?;
            params::exchange(memory, params, |param| Some(&mut param.param));
            params::exchange(memory, model_copies, |param| param.model_copy.as_mut());
            Ok(())
        }
    };
}
pub(crate) use parameter_memory;
