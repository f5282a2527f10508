//! What needs no group: versions, and reports about configurations.

use crate::comm::number;
use crate::error::Result;
use crate::library::{self, c_text, text_of};

/// ABI version of the loaded library: major and minor. Errors: `LibraryLoad`.
pub fn abi_version() -> Result<(u32, u32)> {
    let version = unsafe { (library::api()?.sotto_abi_version)() };
    Ok((version >> 16, version & 0xffff))
}

/// Version of the loaded library, "0.2.0". Errors: `LibraryLoad`.
pub fn library_version() -> Result<String> {
    Ok(unsafe { text_of((library::api()?.sotto_version_string)()) })
}

/// What was compiled in, as JSON. Errors: `LibraryLoad`.
pub fn build_info() -> Result<String> {
    Ok(unsafe { text_of((library::api()?.sotto_build_info)()) })
}

/// The library's name of a status code: "PEER_LOST". Errors: `LibraryLoad`.
pub fn status_name(code: i32) -> Result<String> {
    Ok(unsafe { text_of((library::api()?.sotto_status_name)(code)) })
}

/// What a DeepSpeed configuration will do here, key by key, as JSON. `world_size`: data-parallel
/// ranks, 0: unknown; `n_params`: parameters, 0: unknown. Errors: `InvalidArgument` (names the key
/// and a remedy).
pub fn config_report(json: &str, world_size: u32, n_params: u64) -> Result<String> {
    let (api, json) = (library::api()?, c_text("json", json)?);
    let world_size = number("world_size", world_size)?;
    library::report(api, |buf, cap, len| unsafe {
        (api.sotto_config_report)(json.as_ptr(), world_size, n_params, buf, cap, len)
    })
}

/// A configuration as plain JSON on one line, with values in place of the texts "auto". `values`: a
/// JSON object from paths to values. Errors: `InvalidArgument` (no JSON: line and column).
pub fn config_resolve(json: &str, values: Option<&str>) -> Result<String> {
    let (api, json) = (library::api()?, c_text("json", json)?);
    let values = values.map(|values| c_text("values", values)).transpose()?;
    let values = values.as_ref().map_or(std::ptr::null(), |values| values.as_ptr());
    library::report(api, |buf, cap, len| unsafe {
        (api.sotto_config_resolve)(json.as_ptr(), values, buf, cap, len)
    })
}

/// What outer steps would cost on a link, as JSON. `json`: `{"params": 1e8, "ranks": 8,
/// "bandwidth_mbit": 100, "step_ms": 50}` and the other keys of `sotto_predict_report`. It
/// measures: seconds. Errors: `InvalidArgument` (names the key).
pub fn predict_report(json: &str) -> Result<String> {
    let (api, json) = (library::api()?, c_text("json", json)?);
    library::report(api, |buf, cap, len| unsafe {
        (api.sotto_predict_report)(json.as_ptr(), buf, cap, len)
    })
}
