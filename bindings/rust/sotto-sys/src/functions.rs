//! Every exported function of the C header, once: as members of [`Api`], and as symbols of a linked
//! library with the feature `link`.

use core::ffi::c_void;
use core::mem;

use crate::constants::SOTTO_ABI_VERSION;
use crate::types::*;

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of one library, by their C names.
        ///
        /// What each does, which errors it gives and which threads may call it is told in
        /// `sotto.h`.
        #[derive(Clone, Copy)]
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($argument: $kind),*) -> $result,)*
        }

        impl Api {
            /// Names of all functions, in the order of the header.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Asks `find` for the address of every function. It gets the name with a final zero
            /// byte and returns NULL for one that is not there.
            ///
            /// # Errors
            /// The name of the first function that is missing.
            ///
            /// # Safety
            /// What `find` returns is NULL or the function of that name with this ABI.
            pub unsafe fn load(
                mut find: impl FnMut(&'static [u8]) -> *mut c_void,
            ) -> Result<Api, &'static str> {
                Ok(Api {
                    $($name: {
                        let address = find(concat!(stringify!($name), "\0").as_bytes());
                        if address.is_null() {
                            return Err(stringify!($name));
                        }
                        mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument: $kind),*) -> $result,
                        >(address)
                    },)*
                })
            }

            /// The functions of the library that the program is linked with.
            #[cfg(feature = "link")]
            pub fn linked() -> Api {
                Api { $($name: linked::$name,)* }
            }
        }

        /// The symbols of the linked library.
        #[cfg(feature = "link")]
        pub mod linked {
            use super::*;

            extern "C" {
                $(pub fn $name($($argument: $kind),*) -> $result;)*
            }
        }
    };
}

functions! {
    fn sotto_abi_version() -> u32;
    fn sotto_version_string() -> *const c_char;
    fn sotto_build_info() -> *const c_char;
    fn sotto_status_name(status: sotto_status) -> *const c_char;
    fn sotto_last_error() -> *const c_char;
    fn sotto_set_log(fn_: sotto_log_fn, user: *mut c_void, level: i32) -> sotto_status;
    fn sotto_context_create_v(
        abi_version: u32,
        config: *const sotto_context_config,
        out_context: *mut *mut sotto_context,
    ) -> sotto_status;
    fn sotto_context_destroy(context: *mut sotto_context) -> sotto_status;
    fn sotto_context_poll(context: *mut sotto_context, timeout_us: i64) -> sotto_status;
    fn sotto_context_report(
        context: *const sotto_context,
        kind: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_trace_span(
        context: *mut sotto_context,
        name: *const c_char,
        begin_ns: i64,
        end_ns: i64,
    ) -> sotto_status;
    fn sotto_unique_id_create(
        context: *mut sotto_context,
        out_id: *mut sotto_unique_id,
    ) -> sotto_status;
    fn sotto_comm_create(
        context: *mut sotto_context,
        config: *const sotto_comm_config,
        out_comm: *mut *mut sotto_comm,
    ) -> sotto_status;
    fn sotto_comm_split(
        comm: *mut sotto_comm,
        color: i32,
        key: i32,
        out_comm: *mut *mut sotto_comm,
    ) -> sotto_status;
    fn sotto_comm_rank(comm: *const sotto_comm, out_rank: *mut i32) -> sotto_status;
    fn sotto_comm_size(comm: *const sotto_comm, out_size: *mut i32) -> sotto_status;
    fn sotto_comm_abort(comm: *mut sotto_comm, reason: *const c_char) -> sotto_status;
    fn sotto_comm_error(comm: *const sotto_comm, out_text: *mut *const c_char) -> sotto_status;
    fn sotto_comm_report(
        comm: *const sotto_comm,
        kind: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_comm_get_counters(
        comm: *const sotto_comm,
        out_counters: *mut sotto_comm_counters,
    ) -> sotto_status;
    fn sotto_comm_destroy(comm: *mut sotto_comm) -> sotto_status;
    fn sotto_op_test(op: *mut sotto_op) -> sotto_status;
    fn sotto_op_wait(op: *mut sotto_op, timeout_us: i64) -> sotto_status;
    fn sotto_op_wait_any(
        ops: *const *mut sotto_op,
        n: u64,
        timeout_us: i64,
        out_index: *mut u64,
    ) -> sotto_status;
    fn sotto_op_wait_all(ops: *const *mut sotto_op, n: u64, timeout_us: i64) -> sotto_status;
    fn sotto_op_stream_wait(op: *mut sotto_op, stream: *mut c_void) -> sotto_status;
    fn sotto_op_error(op: *const sotto_op, out_text: *mut *const c_char) -> sotto_status;
    fn sotto_op_get_stats(op: *const sotto_op, out_stats: *mut sotto_op_stats) -> sotto_status;
    fn sotto_op_release(op: *mut sotto_op) -> sotto_status;
    fn sotto_barrier(
        comm: *mut sotto_comm,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_broadcast(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        root: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_all_gather(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_all_gather_v(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        parts: *const sotto_parts,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_reduce_scatter(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_reduce_scatter_v(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        parts: *const sotto_parts,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_reduce(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        root: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_all_reduce(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_gather(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        root: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_scatter(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        root: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_all_to_all(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        out: *const sotto_buffer,
        n: u64,
        parts: *const sotto_parts,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_send(
        comm: *mut sotto_comm,
        in_: *const sotto_buffer,
        n: u64,
        peer: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_recv(
        comm: *mut sotto_comm,
        out: *const sotto_buffer,
        n: u64,
        peer: i32,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_group_begin(comm: *mut sotto_comm) -> sotto_status;
    fn sotto_group_end(
        comm: *mut sotto_comm,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_codec_create(
        comm: *mut sotto_comm,
        json: *const c_char,
        like: *const sotto_buffer,
        n: u64,
        out_codec: *mut *mut sotto_codec,
    ) -> sotto_status;
    fn sotto_codec_destroy(codec: *mut sotto_codec) -> sotto_status;
    fn sotto_codec_state_export(
        codec: *const sotto_codec,
        mode: sotto_state_mode,
        buf: *mut c_void,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_codec_state_import(
        codec: *mut sotto_codec,
        mode: sotto_state_mode,
        buf: *const c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_plan_report(
        comm: *const sotto_comm,
        request: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_config_report(
        json: *const c_char,
        world_size: i32,
        n_params: u64,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_config_resolve(
        json: *const c_char,
        values: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_optim_create(
        comm: *mut sotto_comm,
        json: *const c_char,
        params: *const sotto_param,
        n: u64,
        out_optim: *mut *mut sotto_optim,
    ) -> sotto_status;
    fn sotto_optim_step(
        optim: *mut sotto_optim,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_optim_replay(optim: *mut sotto_optim, op: *mut sotto_op) -> sotto_status;
    fn sotto_optim_accumulate(
        optim: *mut sotto_optim,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_optim_set(
        optim: *mut sotto_optim,
        name: *const c_char,
        group: i32,
        value: f64,
    ) -> sotto_status;
    fn sotto_optim_set_grads(
        optim: *mut sotto_optim,
        grads: *const sotto_buffer,
        n: u64,
    ) -> sotto_status;
    fn sotto_optim_get_info(
        optim: *const sotto_optim,
        out_info: *mut sotto_optim_info,
    ) -> sotto_status;
    fn sotto_optim_report(
        optim: *const sotto_optim,
        kind: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_optim_state_export(
        optim: *const sotto_optim,
        mode: sotto_state_mode,
        buf: *mut c_void,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_optim_state_import(
        optim: *mut sotto_optim,
        mode: sotto_state_mode,
        buf: *const c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_optim_state_import_arrays(
        optim: *mut sotto_optim,
        arrays: *const sotto_named_array,
        n: u64,
    ) -> sotto_status;
    fn sotto_optim_synchronize(
        optim: *mut sotto_optim,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_optim_state_write(
        optim: *const sotto_optim,
        mode: sotto_state_mode,
        write: sotto_write_fn,
        user: *mut c_void,
    ) -> sotto_status;
    fn sotto_optim_state_read(
        optim: *mut sotto_optim,
        mode: sotto_state_mode,
        read: sotto_read_fn,
        user: *mut c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_optim_set_user_state(
        optim: *mut sotto_optim,
        data: *const c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_optim_get_user_state(
        optim: *const sotto_optim,
        buf: *mut c_void,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_optim_set_params(
        optim: *mut sotto_optim,
        params: *const sotto_buffer,
        model_copies: *const sotto_buffer,
        n: u64,
    ) -> sotto_status;
    fn sotto_optim_set_frozen(optim: *mut sotto_optim, frozen: *const u8, n: u64) -> sotto_status;
    fn sotto_optim_destroy(optim: *mut sotto_optim) -> sotto_status;
    fn sotto_outer_create(
        comm: *mut sotto_comm,
        json: *const c_char,
        params: *const sotto_param,
        n: u64,
        out_outer: *mut *mut sotto_outer,
    ) -> sotto_status;
    fn sotto_outer_create_sharded(
        comm: *mut sotto_comm,
        shards: *mut sotto_comm,
        json: *const c_char,
        params: *const sotto_param,
        n: u64,
        out_outer: *mut *mut sotto_outer,
    ) -> sotto_status;
    fn sotto_optim_outer(optim: *mut sotto_optim, out_outer: *mut *mut sotto_outer) -> sotto_status;
    fn sotto_outer_set(outer: *mut sotto_outer, name: *const c_char, value: f64) -> sotto_status;
    fn sotto_outer_set_params(
        outer: *mut sotto_outer,
        params: *const sotto_buffer,
        model_copies: *const sotto_buffer,
        n: u64,
    ) -> sotto_status;
    fn sotto_outer_step(
        outer: *mut sotto_outer,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_outer_flush(
        outer: *mut sotto_outer,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_outer_swap(
        outer: *mut sotto_outer,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_outer_vote(outer: *mut sotto_outer, bits: u32) -> sotto_status;
    fn sotto_outer_get_info(
        outer: *const sotto_outer,
        out_info: *mut sotto_outer_info,
    ) -> sotto_status;
    fn sotto_outer_state_export(
        outer: *const sotto_outer,
        mode: sotto_state_mode,
        buf: *mut c_void,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_outer_state_import(
        outer: *mut sotto_outer,
        mode: sotto_state_mode,
        buf: *const c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_outer_destroy(outer: *mut sotto_outer) -> sotto_status;
    fn sotto_predict_report(
        json: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_overlap_create(
        comm: *mut sotto_comm,
        json: *const c_char,
        like: *const sotto_buffer,
        n: u64,
        out_overlap: *mut *mut sotto_overlap,
    ) -> sotto_status;
    fn sotto_overlap_create_step(
        optim: *mut sotto_optim,
        json: *const c_char,
        out_overlap: *mut *mut sotto_overlap,
    ) -> sotto_status;
    fn sotto_overlap_begin(
        overlap: *mut sotto_overlap,
        call: *const sotto_call,
        out_op: *mut *mut sotto_op,
    ) -> sotto_status;
    fn sotto_overlap_ready(
        overlap: *mut sotto_overlap,
        indices: *const u64,
        grads: *const sotto_buffer,
        n: u64,
        stream: *mut c_void,
    ) -> sotto_status;
    fn sotto_overlap_unused(
        overlap: *mut sotto_overlap,
        indices: *const u64,
        n: u64,
    ) -> sotto_status;
    fn sotto_overlap_finish(overlap: *mut sotto_overlap) -> sotto_status;
    fn sotto_overlap_withdraw(overlap: *mut sotto_overlap, reason: *const c_char) -> sotto_status;
    fn sotto_overlap_get_info(
        overlap: *const sotto_overlap,
        out_info: *mut sotto_overlap_info,
    ) -> sotto_status;
    fn sotto_overlap_report(
        overlap: *const sotto_overlap,
        kind: *const c_char,
        buf: *mut c_char,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_overlap_state_export(
        overlap: *const sotto_overlap,
        mode: sotto_state_mode,
        buf: *mut c_void,
        cap: u64,
        out_len: *mut u64,
    ) -> sotto_status;
    fn sotto_overlap_state_import(
        overlap: *mut sotto_overlap,
        mode: sotto_state_mode,
        buf: *const c_void,
        len: u64,
    ) -> sotto_status;
    fn sotto_overlap_destroy(overlap: *mut sotto_overlap) -> sotto_status;
}

impl Api {
    /// `sotto_context_create`, which is inline in C: passes the version of these declarations.
    ///
    /// # Safety
    /// `config` is NULL or leads to a struct, `out_context` leads to a place for a handle.
    pub unsafe fn sotto_context_create(
        &self,
        config: *const sotto_context_config,
        out_context: *mut *mut sotto_context,
    ) -> sotto_status {
        (self.sotto_context_create_v)(SOTTO_ABI_VERSION, config, out_context)
    }
}

impl core::fmt::Debug for Api {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Api of {} functions", Self::NAMES.len())
    }
}
