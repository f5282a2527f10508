//! Constants, in the order of the C header.

use crate::types::*;

pub const SOTTO_ABI_MAJOR: u32 = 0;
pub const SOTTO_ABI_MINOR: u32 = 2;
pub const SOTTO_ABI_VERSION: u32 = SOTTO_ABI_MAJOR << 16 | SOTTO_ABI_MINOR;

pub const SOTTO_OK: sotto_status = 0;
pub const SOTTO_IN_PROGRESS: sotto_status = 1;
pub const SOTTO_E_INVALID_ARGUMENT: sotto_status = -1;
pub const SOTTO_E_INVALID_STATE: sotto_status = -2;
pub const SOTTO_E_UNSUPPORTED: sotto_status = -3;
pub const SOTTO_E_OUT_OF_MEMORY: sotto_status = -4;
pub const SOTTO_E_BUSY: sotto_status = -5;
pub const SOTTO_E_TIMEOUT: sotto_status = -6;
pub const SOTTO_E_PEER_LOST: sotto_status = -7;
pub const SOTTO_E_ABORTED: sotto_status = -8;
pub const SOTTO_E_PROTOCOL: sotto_status = -9;
pub const SOTTO_E_TRANSPORT: sotto_status = -10;
pub const SOTTO_E_DEVICE: sotto_status = -11;
pub const SOTTO_E_INTERNAL: sotto_status = -12;
pub const SOTTO_E_NONFINITE: sotto_status = -13;
pub const SOTTO_E_CANCELLED: sotto_status = -14;

pub const SOTTO_INT8: sotto_dtype = 0x0001_0800;
pub const SOTTO_INT16: sotto_dtype = 0x0001_1000;
pub const SOTTO_INT32: sotto_dtype = 0x0001_2000;
pub const SOTTO_INT64: sotto_dtype = 0x0001_4000;
pub const SOTTO_UINT8: sotto_dtype = 0x0001_0801;
pub const SOTTO_UINT16: sotto_dtype = 0x0001_1001;
pub const SOTTO_UINT32: sotto_dtype = 0x0001_2001;
pub const SOTTO_UINT64: sotto_dtype = 0x0001_4001;
pub const SOTTO_FLOAT16: sotto_dtype = 0x0001_1002;
pub const SOTTO_FLOAT32: sotto_dtype = 0x0001_2002;
pub const SOTTO_FLOAT64: sotto_dtype = 0x0001_4002;
pub const SOTTO_BFLOAT16: sotto_dtype = 0x0001_1004;

pub const SOTTO_DEVICE_CPU: sotto_device_type = 1;
pub const SOTTO_DEVICE_CUDA: sotto_device_type = 2;
pub const SOTTO_DEVICE_CUDA_HOST: sotto_device_type = 3;

pub const SOTTO_REDUCE_DEFAULT: sotto_reduce_op = 0;
pub const SOTTO_REDUCE_SUM: sotto_reduce_op = 1;
pub const SOTTO_REDUCE_MEAN: sotto_reduce_op = 2;
pub const SOTTO_REDUCE_MIN: sotto_reduce_op = 3;
pub const SOTTO_REDUCE_MAX: sotto_reduce_op = 4;
pub const SOTTO_REDUCE_PROD: sotto_reduce_op = 5;
pub const SOTTO_REDUCE_BIT_OR: sotto_reduce_op = 6;

pub const SOTTO_UNIQUE_ID_BYTES: usize = 128;

pub const SOTTO_CALL_DONE_ANY_THREAD: u32 = 1;
pub const SOTTO_CALL_NO_BLOCK: u32 = 2;

pub const SOTTO_PRIORITY_BACKGROUND: i32 = -1000;

pub const SOTTO_STATE_CONFIGURED: sotto_state_mode = 0;
pub const SOTTO_STATE_EXACT: sotto_state_mode = 1;
pub const SOTTO_STATE_RESET: sotto_state_mode = 2;
pub const SOTTO_STATE_MEAN: sotto_state_mode = 3;
pub const SOTTO_STATE_COMMON: sotto_state_mode = 4;

pub const SOTTO_OUTER_LAUNCHED: u32 = 1;
pub const SOTTO_OUTER_CONSUMED: u32 = 2;
pub const SOTTO_OUTER_HELD: u32 = 4;
pub const SOTTO_OUTER_WAITED: u32 = 8;
pub const SOTTO_OUTER_MEASURING: u32 = 16;
