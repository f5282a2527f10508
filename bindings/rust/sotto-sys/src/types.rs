//! Types, structs and callbacks, in the order of the C header.

use core::ffi::c_void;
use core::mem;

use crate::constants::SOTTO_UNIQUE_ID_BYTES;

/// `char` of C on this platform; the same type as `std::os::raw::c_char`.
#[cfg(any(target_arch = "aarch64", target_arch = "riscv64", target_arch = "powerpc64"))]
pub type c_char = u8;
/// `char` of C on this platform; the same type as `std::os::raw::c_char`.
#[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64", target_arch = "powerpc64")))]
pub type c_char = i8;

pub type sotto_status = i32;
pub type sotto_dtype = u32;
pub type sotto_device_type = i32;
pub type sotto_reduce_op = i32;
pub type sotto_state_mode = i32;

macro_rules! handles {
    ($($name:ident),* $(,)?) => {$(
        /// An opaque handle.
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _opaque: [u8; 0],
            _not_send: core::marker::PhantomData<(*mut u8, core::marker::PhantomPinned)>,
        }
    )*};
}

handles! {
    sotto_context, sotto_comm, sotto_op, sotto_codec, sotto_optim, sotto_outer, sotto_overlap,
}

pub type sotto_all_gather_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        in_: *const c_void,
        bytes: u64,
        out: *mut c_void,
    ) -> i32,
>;
pub type sotto_done_fn = Option<unsafe extern "C" fn(user: *mut c_void, status: sotto_status)>;
pub type sotto_log_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;
pub type sotto_write_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, data: *const c_void, bytes: u64) -> i32>;
pub type sotto_read_fn = Option<
    unsafe extern "C" fn(user: *mut c_void, offset: u64, data: *mut c_void, bytes: u64) -> i32,
>;

/// A borrowed view of contiguous memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_buffer {
    pub data: *mut c_void,
    pub count: u64,
    pub dtype: sotto_dtype,
    pub device_type: sotto_device_type,
    pub device_id: i32,
    pub flags: u32,
}

/// The bytes by which the ranks of one comm find each other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_unique_id {
    pub bytes: [u8; SOTTO_UNIQUE_ID_BYTES],
}

/// Settings of a context.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_context_config {
    pub struct_size: u32,
    pub no_progress_thread: u32,
    pub cpu_threads: u32,
    pub max_ops: u32,
}

/// Settings of a comm.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_comm_config {
    pub struct_size: u32,
    pub rank: i32,
    pub size: i32,
    pub reserved: u32,
    pub id: *const sotto_unique_id,
    pub transport: *const c_char,
    pub timeout_us: i64,
    pub all_gather: sotto_all_gather_fn,
    pub user: *mut c_void,
    pub native_comm: *mut c_void,
}

/// The parts of one tensor that go to each rank and come from it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_parts {
    pub struct_size: u32,
    pub reserved: u32,
    pub in_counts: *const u64,
    pub in_offsets: *const u64,
    pub out_counts: *const u64,
    pub out_offsets: *const u64,
}

/// What may vary per call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_call {
    pub struct_size: u32,
    pub flags: u32,
    pub tag: u64,
    pub stream: *mut c_void,
    pub timeout_us: i64,
    pub priority: i32,
    pub reduce: sotto_reduce_op,
    pub codec: *mut sotto_codec,
    pub on_done: sotto_done_fn,
    pub user: *mut c_void,
}

/// One tensor of an optimizer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_param {
    pub struct_size: u32,
    pub group: u32,
    pub name: *const c_char,
    pub param: sotto_buffer,
    pub grad: sotto_buffer,
    pub model_copy: sotto_buffer,
    pub mask: sotto_buffer,
    pub models: u64,
}

/// One array of a DeepSpeed checkpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_named_array {
    pub struct_size: u32,
    pub reserved: u32,
    pub name: *const c_char,
    pub values: sotto_buffer,
}

/// Counters of one comm.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_comm_counters {
    pub struct_size: u32,
    pub reserved: u32,
    pub payload_bytes_sent: u64,
    pub payload_bytes_received: u64,
    pub header_bytes_sent: u64,
    pub header_bytes_received: u64,
    pub service_bytes_sent: u64,
    pub service_bytes_received: u64,
    pub messages_sent: u64,
    pub messages_received: u64,
    pub payload_bytes_planned: u64,
    pub header_bytes_planned: u64,
    pub kernel_ns: u64,
    pub ops_completed: u64,
}

/// Times and bytes of one operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_op_stats {
    pub struct_size: u32,
    pub reserved: u32,
    pub launch_ns: i64,
    pub start_ns: i64,
    pub end_ns: i64,
    pub kernel_ns: u64,
    pub payload_bytes_planned: u64,
    pub header_bytes_planned: u64,
    pub exposed_ns: i64,
}

/// Hot figures of an optimizer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_optim_info {
    pub struct_size: u32,
    pub stage: i32,
    pub step: u64,
    pub state_step: u64,
    pub lr: f64,
    pub grad_norm: f64,
    pub payload_bytes_next_step: u64,
    pub header_bytes_next_step: u64,
    pub state_bytes: u64,
    pub skipped_steps: u64,
    pub loss_scale: f64,
    pub micro_batches: u64,
}

/// Hot figures of an outer optimizer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_outer_info {
    pub struct_size: u32,
    pub events: u32,
    pub step: u64,
    pub round: u64,
    pub next_boundary: u64,
    pub fragments: u32,
    pub in_flight: u32,
    pub votes: u32,
    pub not_finite: u32,
    pub lambda: f64,
    pub gap: f64,
    pub unit: f64,
    pub clip_fraction: f64,
    pub delta_norm: f64,
    pub step_norm: f64,
    pub gain: f64,
    pub overlap_ratio: f64,
    pub contention: f64,
    pub network_ns: i64,
    pub exposed_ns: i64,
    pub payload_bytes_next_launch: u64,
    pub header_bytes_next_launch: u64,
    pub state_bytes: u64,
    pub period: u64,
    pub delay: u64,
    pub loss: f64,
}

/// Hot figures of an overlap.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct sotto_overlap_info {
    pub struct_size: u32,
    pub buckets: u32,
    pub rounds: u64,
    pub layout: u64,
    pub begin_to_last_ready_ns: i64,
    pub network_ns: i64,
    pub exposed_ns: i64,
    pub payload_bytes_per_round: u64,
    pub header_bytes_per_round: u64,
    pub state_bytes: u64,
    pub missing: u32,
    pub reserved: u32,
    pub early_payload_bytes_per_round: u64,
}
// Defaults are the `_INIT` macros of C: zero, and struct_size set where there is one.
macro_rules! defaults {
    ($($name:ident $(, $size:ident)?;)*) => {$(
        impl Default for $name {
            #[allow(unused_mut)]
            fn default() -> Self {
                // Zero is valid: the members are numbers, pointers, and callbacks that may be None.
                let mut all: Self = unsafe { mem::zeroed() };
                $(all.$size = mem::size_of::<Self>() as u32;)?
                all
            }
        }
    )*};
}

defaults! {
    sotto_buffer;
    sotto_unique_id;
    sotto_context_config, struct_size;
    sotto_comm_config, struct_size;
    sotto_parts, struct_size;
    sotto_call, struct_size;
    sotto_param, struct_size;
    sotto_named_array, struct_size;
    sotto_comm_counters, struct_size;
    sotto_op_stats, struct_size;
    sotto_optim_info, struct_size;
    sotto_outer_info, struct_size;
    sotto_overlap_info, struct_size;
}

// Sizes and alignments hold while compiling, offsets in the test below: the oldest compiler that
// is supported has no constant for them.
macro_rules! layout {
    ($($name:ident: $size:literal bytes, align $align:literal {
        $($field:ident: $offset:literal),* $(,)?
    })*) => {
        $(const _: () = assert!(mem::size_of::<$name>() == $size);
        const _: () = assert!(mem::align_of::<$name>() == $align);)*

        #[cfg(test)]
        mod tests {
            use super::*;

            #[test]
            fn fields_are_where_c_has_them() {
                $({
                    let all = $name::default();
                    let base = &all as *const $name as usize;
                    $(assert_eq!(
                        core::ptr::addr_of!(all.$field) as usize - base,
                        $offset,
                        concat!(stringify!($name), ".", stringify!($field))
                    );)*
                })*
            }
        }
    };
}

layout! {
    sotto_buffer: 32 bytes, align 8 {
        data: 0, count: 8, dtype: 16, device_type: 20, device_id: 24, flags: 28,
    }
    sotto_unique_id: 128 bytes, align 1 {
        bytes: 0,
    }
    sotto_context_config: 16 bytes, align 4 {
        struct_size: 0, no_progress_thread: 4, cpu_threads: 8, max_ops: 12,
    }
    sotto_comm_config: 64 bytes, align 8 {
        struct_size: 0, rank: 4, size: 8, reserved: 12, id: 16, transport: 24, timeout_us: 32,
        all_gather: 40, user: 48, native_comm: 56,
    }
    sotto_parts: 40 bytes, align 8 {
        struct_size: 0, reserved: 4, in_counts: 8, in_offsets: 16, out_counts: 24,
        out_offsets: 32,
    }
    sotto_call: 64 bytes, align 8 {
        struct_size: 0, flags: 4, tag: 8, stream: 16, timeout_us: 24, priority: 32, reduce: 36,
        codec: 40, on_done: 48, user: 56,
    }
    sotto_param: 152 bytes, align 8 {
        struct_size: 0, group: 4, name: 8, param: 16, grad: 48, model_copy: 80, mask: 112,
        models: 144,
    }
    sotto_named_array: 48 bytes, align 8 {
        struct_size: 0, reserved: 4, name: 8, values: 16,
    }
    sotto_comm_counters: 104 bytes, align 8 {
        struct_size: 0, reserved: 4, payload_bytes_sent: 8, payload_bytes_received: 16,
        header_bytes_sent: 24, header_bytes_received: 32, service_bytes_sent: 40,
        service_bytes_received: 48, messages_sent: 56, messages_received: 64,
        payload_bytes_planned: 72, header_bytes_planned: 80, kernel_ns: 88, ops_completed: 96,
    }
    sotto_op_stats: 64 bytes, align 8 {
        struct_size: 0, reserved: 4, launch_ns: 8, start_ns: 16, end_ns: 24, kernel_ns: 32,
        payload_bytes_planned: 40, header_bytes_planned: 48,
        exposed_ns: 56,
    }
    sotto_optim_info: 88 bytes, align 8 {
        struct_size: 0, stage: 4, step: 8, state_step: 16, lr: 24, grad_norm: 32,
        payload_bytes_next_step: 40, header_bytes_next_step: 48, state_bytes: 56,
        skipped_steps: 64, loss_scale: 72, micro_batches: 80,
    }
    sotto_outer_info: 184 bytes, align 8 {
        struct_size: 0, events: 4, step: 8, round: 16, next_boundary: 24, fragments: 32,
        in_flight: 36, votes: 40, not_finite: 44, lambda: 48, gap: 56, unit: 64, clip_fraction: 72,
        delta_norm: 80, step_norm: 88, gain: 96, overlap_ratio: 104, contention: 112,
        network_ns: 120, exposed_ns: 128, payload_bytes_next_launch: 136,
        header_bytes_next_launch: 144, state_bytes: 152, period: 160, delay: 168,
        loss: 176,
    }
    sotto_overlap_info: 88 bytes, align 8 {
        struct_size: 0, buckets: 4, rounds: 8, layout: 16, begin_to_last_ready_ns: 24,
        network_ns: 32, exposed_ns: 40, payload_bytes_per_round: 48, header_bytes_per_round: 56,
        state_bytes: 64, missing: 72, reserved: 76,
        early_payload_bytes_per_round: 80,
    }
}
