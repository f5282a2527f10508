/* sotto.h - the C interface of libsotto, a library that lets distributed training talk less.
 *
 * One rank is one sotto_context (several per process are allowed: ranks as threads). Ranks find each other through a
 * sotto_unique_id or a launcher's environment and form a sotto_comm. Collectives and optimizer steps are asynchronous
 * operations (sotto_op). Configuration is JSON text in DeepSpeed's words; reports are JSON text too.
 *
 * Conventions that hold for every function:
 *   - The return value is a sotto_status: SOTTO_OK, a positive "not yet", or a negative SOTTO_E_... code.
 *     sotto_last_error() has the text. Outputs (out_*) are written only on success.
 *   - Structs that the caller fills start with struct_size (set it to sizeof, or use the SOTTO_..._INIT macro).
 *     A field that is all zero means its default. Fields this library does not know must be zero.
 *   - Handles are opaque. _destroy(NULL) and _release(NULL) do nothing. Children keep their parent alive, so the
 *     order of destruction does not matter.
 *   - Times are microseconds. A negative time-out means "no limit of its own".
 *   - Strings are UTF-8 and end with a zero byte; strings passed in are copied during the call.
 *   - Threads: "any" = any thread at any time; "one per handle" = calls on one handle must not overlap;
 *     "not from callbacks" = never from inside a callback of this library.
 *   - Blocks: whether the call may wait for other ranks. Every wait has a deadline.
 *   - Stream: how the call orders itself against the stream in sotto_call; ignored for host memory.
 */
#ifndef SOTTO_SOTTO_H
#define SOTTO_SOTTO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ABI version: major << 16 | minor. A client works with a library of the same major and the same or a later minor. */
#define SOTTO_ABI_MAJOR 0
#define SOTTO_ABI_MINOR 1
#define SOTTO_ABI_VERSION ((uint32_t)((SOTTO_ABI_MAJOR << 16) | SOTTO_ABI_MINOR))

#if defined(__GNUC__)
#define SOTTO_API __attribute__((visibility("default")))
#else
#define SOTTO_API
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef int32_t sotto_status;
#define SOTTO_OK 0                    /* done */
#define SOTTO_IN_PROGRESS 1           /* not finished: poll or wait */
#define SOTTO_E_INVALID_ARGUMENT (-1) /* caller bug: fix the program */
#define SOTTO_E_INVALID_STATE (-2)    /* wrong order of calls: fix the program */
#define SOTTO_E_UNSUPPORTED (-3)      /* unknown or not compiled in: choose another; the text names the missing part */
#define SOTTO_E_OUT_OF_MEMORY (-4)    /* free something, retry */
#define SOTTO_E_BUSY (-5)             /* local resource in use: retry later */
#define SOTTO_E_TIMEOUT (-6)          /* group failed: abort, rebuild, resume from saved state */
#define SOTTO_E_PEER_LOST (-7)        /* group failed: abort, rebuild, resume from saved state */
#define SOTTO_E_ABORTED (-8)          /* group was aborted by a rank: rebuild, resume from saved state */
#define SOTTO_E_PROTOCOL (-9)         /* ranks disagree, a peer speaks another format, or a frame is corrupt */
#define SOTTO_E_TRANSPORT (-10)       /* local network failure */
#define SOTTO_E_DEVICE (-11)          /* local device failure */
#define SOTTO_E_INTERNAL (-12)        /* a bug of this library: report it */
#define SOTTO_E_NONFINITE (-13)       /* NaN or Inf was met; nothing was updated, the group is healthy */
#define SOTTO_E_CANCELLED (-14)       /* the operation was withdrawn before it started */

/* ---- dtypes, devices, reductions ---------------------------------------------------------------------------- */

typedef uint32_t sotto_dtype; /* DLPack: code | bits << 8 | lanes << 16 */
#define SOTTO_INT32 0x00012000u
#define SOTTO_INT64 0x00014000u
#define SOTTO_UINT8 0x00010801u
#define SOTTO_FLOAT16 0x00011002u
#define SOTTO_FLOAT32 0x00012002u
#define SOTTO_FLOAT64 0x00014002u
#define SOTTO_BFLOAT16 0x00011004u

typedef int32_t sotto_device_type; /* DLPack's numbers */
#define SOTTO_DEVICE_CPU 1

typedef int32_t sotto_reduce;
#define SOTTO_REDUCE_DEFAULT 0 /* sum */
#define SOTTO_REDUCE_SUM 1
#define SOTTO_REDUCE_MEAN 2 /* floating-point dtypes only: sum, then divided by the number of ranks */
#define SOTTO_REDUCE_MIN 3  /* NaN if any rank has one */
#define SOTTO_REDUCE_MAX 4  /* NaN if any rank has one */

/* ---- handles ------------------------------------------------------------------------------------------------ */

typedef struct sotto_context sotto_context;
typedef struct sotto_comm sotto_comm;
typedef struct sotto_op sotto_op;
typedef struct sotto_codec sotto_codec;
typedef struct sotto_optim sotto_optim;

/* ---- structs ------------------------------------------------------------------------------------------------ */

/* A borrowed view of contiguous memory; frozen at 32 bytes. The caller keeps the memory alive and does not touch it
 * from the call until the operation has completed. */
typedef struct sotto_buffer {
  void *data;                    /* aligned to the element size; may be NULL only if count is 0 */
  uint64_t count;                /* elements */
  sotto_dtype dtype;             /* SOTTO_FLOAT32, ... */
  sotto_device_type device_type; /* SOTTO_DEVICE_CPU; 0 means CPU */
  int32_t device_id;             /* 0 for the CPU */
  uint32_t flags;                /* must be 0 */
} sotto_buffer;

#define SOTTO_UNIQUE_ID_BYTES 128
typedef struct sotto_unique_id {
  uint8_t bytes[SOTTO_UNIQUE_ID_BYTES];
} sotto_unique_id;

typedef struct sotto_context_config {
  uint32_t struct_size;
  uint32_t no_progress_thread; /* 1: the library starts no thread; the caller drives sotto_context_poll. 0: one thread */
  uint32_t cpu_threads;        /* threads for CPU kernels; 0: SOTTO_CPU_THREADS, else cores / local ranks */
  uint32_t max_ops;            /* operations in flight at most; 0: 1024 */
} sotto_context_config;
#define SOTTO_CONTEXT_CONFIG_INIT {sizeof(sotto_context_config), 0, 0, 0}

/* All-gather that the caller supplies to set a comm up over a launcher of its own: writes `bytes` bytes of every rank,
 * in rank order, to `out`. Returns 0 on success. Called on the thread that creates the comm. */
typedef int32_t (*sotto_all_gather_fn)(void *user, const void *in, uint64_t bytes, void *out);

typedef struct sotto_comm_config {
  uint32_t struct_size;
  int32_t rank;              /* 0 .. size-1; used only if size > 0 */
  int32_t size;              /* ranks; 0: rank and size from the launcher's environment */
  uint32_t reserved;         /* must be 0 */
  const sotto_unique_id *id; /* NULL: SOTTO_RENDEZVOUS or the launcher's environment */
  const char *transport;     /* "auto" (NULL), "inproc", "tcp" */
  int64_t timeout_us;        /* deadline of set-up and default of every operation; 0: SOTTO_TIMEOUT_US (300 s) */
  sotto_all_gather_fn all_gather; /* NULL: the library's own rendezvous; else used instead of `id` */
  void *user;                     /* passed to all_gather */
} sotto_comm_config;
#define SOTTO_COMM_CONFIG_INIT {sizeof(sotto_comm_config), 0, 0, 0, NULL, NULL, 0, NULL, NULL}

/* Called once when the operation has completed, on the thread that waits, tests or calls sotto_context_poll, unless
 * SOTTO_CALL_DONE_ANY_THREAD is set: then also on the library's own thread. Must not call back into the library, except
 * for sotto_op_error and sotto_op_test on its op. */
typedef void (*sotto_done_fn)(void *user, sotto_status status);

#define SOTTO_CALL_DONE_ANY_THREAD 1u /* on_done may run on the library's own thread */
#define SOTTO_CALL_NO_BLOCK 2u        /* return SOTTO_E_BUSY instead of waiting for a free operation slot */

/* What may vary per call. NULL or all zero: defaults. */
typedef struct sotto_call {
  uint32_t struct_size;
  uint32_t flags;      /* SOTTO_CALL_... */
  uint64_t tag;        /* must be equal on all ranks of the operation (checked); send/recv: must match the peer's */
  void *stream;        /* reads happen after work queued on it; ignored for host memory */
  int64_t timeout_us;  /* this operation may stand still at most so long; 0: the comm's; negative: forever */
  int32_t priority;    /* larger is more urgent; equal on all ranks; 0 is normal */
  sotto_reduce reduce; /* SOTTO_REDUCE_...; 0 is sum. With a codec: 0 or mean, and the result is the mean */
  sotto_codec *codec;  /* how the data is encoded on the wire; NULL: as it is */
  sotto_done_fn on_done; /* may be NULL */
  void *user;            /* passed to on_done */
} sotto_call;
#define SOTTO_CALL_INIT {sizeof(sotto_call), 0, 0, NULL, 0, 0, 0, NULL, NULL, NULL}

/* One tensor of an optimizer. In an array the stride is the first element's struct_size. */
typedef struct sotto_param {
  uint32_t struct_size;
  uint32_t group;          /* index into the optimizer's parameter groups (sotto_optim_create) */
  const char *name;        /* unique, at most 255 bytes; NULL: "param<index>" */
  sotto_buffer param;      /* fp32 master, updated in place */
  sotto_buffer grad;       /* fp32, same count: the local gradient (mean over this rank's samples); never written */
  sotto_buffer model_copy; /* count 0: none */
  sotto_buffer mask;       /* uint8, same count, 0 or 1: elements with 0 take no part (momentum stays 0); count 0: none */
  uint64_t models;         /* 0 or 1 */
} sotto_param;

/* ---- library ------------------------------------------------------------------------------------------------ */

/* ABI version of the loaded library: major << 16 | minor.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API uint32_t sotto_abi_version(void);

/* Version of the loaded library, "0.1.0". The string lives as long as the library.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char *sotto_version_string(void);

/* What was compiled in, as JSON: transports, devices, codecs, optimizers, SIMD targets, compiler. The string lives as
 * long as the library.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char *sotto_build_info(void);

/* Name of a status code without prefix: "OK", "PEER_LOST"; "UNKNOWN" for any other number. Lives as long as the library.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char *sotto_status_name(sotto_status status);

/* Text of this thread's last synchronous call that failed, "" after one that succeeded. Valid until this thread's next
 * call into the library. Operations and comms keep their own text: sotto_op_error, sotto_comm_error.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char *sotto_last_error(void);

/* Log sink; level: 1 error, 2 warning, 3 info, 4 debug, 5 trace. May be called on any thread of the process. */
typedef void (*sotto_log_fn)(void *user, int32_t level, const char *message);

/* Sends the log of the whole process to fn instead of standard error.
 *   fn    [in]  NULL: standard error again
 *   user  [in]  passed to fn; borrowed until the sink is replaced
 *   level [in]  messages above it are dropped; 0: SOTTO_LOG, else 2 (warning)
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (level not 0..5). Since: 0.1 */
SOTTO_API sotto_status sotto_set_log(sotto_log_fn fn, void *user, int32_t level);

/* ---- context ------------------------------------------------------------------------------------------------ */

/* Creates the context of one rank: devices, progress thread, parameters from SOTTO_* variables. Use
 * sotto_context_create, which passes the version this header was compiled with.
 *   abi_version [in]  SOTTO_ABI_VERSION
 *   config      [in]  NULL: defaults
 *   out_context [out] owned by the caller: sotto_context_destroy
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (a bad field or SOTTO_* value), UNSUPPORTED (abi_version, newer
 * field), OUT_OF_MEMORY. Since: 0.1 */
SOTTO_API sotto_status sotto_context_create_v(uint32_t abi_version, const sotto_context_config *config,
                                              sotto_context **out_context);

static inline sotto_status sotto_context_create(const sotto_context_config *config, sotto_context **out_context) {
  return sotto_context_create_v(SOTTO_ABI_VERSION, config, out_context);
}

/* Destroys the caller's reference. Comms that still use the context keep it working until they are destroyed.
 *   context [in] NULL: nothing happens
 * Threads: any, not from callbacks. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API sotto_status sotto_context_destroy(sotto_context *context);

/* Makes progress on everything in flight, and runs callbacks that are due. Needed only with no_progress_thread, or to
 * have callbacks run here.
 *   timeout_us [in] 0: do what is ready and return; > 0: wait at most so long for something to happen
 * Threads: any, not from callbacks. Blocks: at most timeout_us. Errors: INVALID_ARGUMENT, INVALID_STATE (after fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_context_poll(sotto_context *context, int64_t timeout_us);

/* Report as JSON: version, devices, transports, SIMD target, parameters in force, memory held.
 *   kind    [in]  NULL or "all"
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind). Since: 0.1 */
SOTTO_API sotto_status sotto_context_report(const sotto_context *context, const char *kind, char *buf, uint64_t cap,
                                            uint64_t *out_len);

/* ---- unique id ---------------------------------------------------------------------------------------------- */

/* Makes an id with which ranks find each other, and listens for them: call it on one rank, carry the 128 bytes to the
 * others by any means, and let every rank pass them to sotto_comm_create. One id makes one comm. The rank that made
 * the id must become a member (any rank number). Listens on loopback unless SOTTO_LISTEN says otherwise.
 *   context [in]  keeps listening until the comm is made or the context is destroyed
 *   out_id  [out]
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT, TRANSPORT (cannot listen). Since: 0.1 */
SOTTO_API sotto_status sotto_unique_id_create(sotto_context *context, sotto_unique_id *out_id);

/* ---- comm --------------------------------------------------------------------------------------------------- */

/* Creates a comm: an ordered set of ranks. Collective: every rank calls it.
 *   config   [in]  NULL: rank, size and rendezvous from the environment (SOTTO_RANK, SOTTO_WORLD_SIZE and
 *                  SOTTO_RENDEZVOUS as sotto-run sets them; else torchrun's, Open MPI's, MPICH's or Slurm's)
 *   out_comm [out] owned by the caller: sotto_comm_destroy
 * Threads: any. Blocks: yes, at most timeout_us. Errors: INVALID_ARGUMENT (two ranks with one number, sizes that differ,
 * rank out of range, bad environment), TIMEOUT (who is missing), PEER_LOST, PROTOCOL (version), TRANSPORT (address
 * not reachable), UNSUPPORTED (transport). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_create(sotto_context *context, const sotto_comm_config *config,
                                         sotto_comm **out_comm);

/* Splits a comm. Ranks with the same color form a new comm, ordered by key, then by rank. Connections are shared with
 * the parent; a failure of one is a failure of all comms of that root. Collective over the parent.
 *   color    [in]  >= 0, or -1: this rank gets no comm (out_comm becomes NULL)
 *   key      [in]  order inside the new comm
 *   out_comm [out] owned by the caller
 * Threads: one per handle. Blocks: yes, at most the comm's timeout. Errors: INVALID_ARGUMENT, the comm's own error.
 * Since: 0.1 */
SOTTO_API sotto_status sotto_comm_split(sotto_comm *comm, int32_t color, int32_t key, sotto_comm **out_comm);

/* Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (NULL). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_rank(const sotto_comm *comm, int32_t *out_rank);
/* Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (NULL). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_size(const sotto_comm *comm, int32_t *out_size);

/* Fails the comm and all comms of its root on every rank: operations in flight end with ABORTED. Waits only until
 * kernels that already write parameters are finished.
 *   reason [in] NULL or text that every rank will read
 * Threads: any, not from callbacks. Blocks: no. Errors: INVALID_ARGUMENT (NULL). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_abort(sotto_comm *comm, const char *reason);

/* The first cause of failure: SOTTO_OK while the comm is healthy. The return value is the state of the comm.
 *   out_text [out] may be NULL; else text that lives as long as the comm ("" while healthy)
 * Threads: any. Blocks: no. Errors: the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_comm_error(const sotto_comm *comm, const char **out_text);

/* Report as JSON.
 *   kind [in] NULL or "all"; "counters" (bytes and messages per peer), "routes", "waiting" (who waits for whom)
 *   buf, cap, out_len as in sotto_context_report
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_report(const sotto_comm *comm, const char *kind, char *buf, uint64_t cap,
                                         uint64_t *out_len);

/* Counters of one comm's root, as measured at the transport. struct_size in, the rest out. */
typedef struct sotto_comm_counters {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t payload_bytes_sent;     /* data; equals the plans' prediction exactly */
  uint64_t payload_bytes_received;
  uint64_t header_bytes_sent;      /* frame headers, trailers, scales and flags; predicted exactly too */
  uint64_t header_bytes_received;
  uint64_t service_bytes_sent;     /* flow control; bounded, not predicted */
  uint64_t service_bytes_received;
  uint64_t messages_sent;
  uint64_t messages_received;
  uint64_t payload_bytes_planned;  /* sum of the predictions of the operations completed so far: what this rank sends */
  uint64_t header_bytes_planned;
  uint64_t kernel_ns;              /* time spent in this context's kernels (codecs, reductions, optimizers) */
  uint64_t ops_completed;
} sotto_comm_counters;

/* Reads the counters of the comm (of this comm alone, not of its root or splits).
 *   out_counters [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT. Since: 0.1 */
SOTTO_API sotto_status sotto_comm_get_counters(const sotto_comm *comm, sotto_comm_counters *out_counters);

/* Destroys the comm: waits for operations in flight at most the comm's timeout, then fails those left. Not collective.
 *   comm [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: yes. Errors: the first error met while draining; the handle is
 * gone in any case. Since: 0.1 */
SOTTO_API sotto_status sotto_comm_destroy(sotto_comm *comm);

/* ---- operations --------------------------------------------------------------------------------------------- */

/* SOTTO_OK or the operation's error when it has completed, SOTTO_IN_PROGRESS before. Makes some progress itself.
 * Threads: any, not from callbacks. Blocks: no. Since: 0.1 */
SOTTO_API sotto_status sotto_op_test(sotto_op *op);

/* Waits for completion. The waiting thread does the work itself.
 *   timeout_us [in] time over: SOTTO_IN_PROGRESS, nothing changes; negative: until the operation ends, which its own
 *              deadline (sotto_call.timeout_us, else the comm's) guarantees
 * Threads: any, not from callbacks. Blocks: yes. Errors: the operation's. Since: 0.1 */
SOTTO_API sotto_status sotto_op_wait(sotto_op *op, int64_t timeout_us);

/* Waits until one of n operations has completed.
 *   ops       [in]  n handles; NULL entries are skipped
 *   out_index [out] the lowest index that has completed
 * Threads: any, not from callbacks. Blocks: yes. Errors: INVALID_ARGUMENT; SOTTO_IN_PROGRESS when the time is over. The
 * operation's own error is not returned: ask sotto_op_test. Since: 0.1 */
SOTTO_API sotto_status sotto_op_wait_any(sotto_op *const *ops, uint64_t n, int64_t timeout_us, uint64_t *out_index);

/* Orders work that the caller queues on `stream` from now on after the operation. Host operations: UNSUPPORTED.
 * Threads: any. Blocks: no. Errors: UNSUPPORTED (no device stream). Since: 0.1 */
SOTTO_API sotto_status sotto_op_stream_wait(sotto_op *op, void *stream);

/* The operation's own status (SOTTO_IN_PROGRESS before completion) and text.
 *   out_text [out] may be NULL; lives until sotto_op_release
 * Threads: any. Blocks: no. Since: 0.1 */
SOTTO_API sotto_status sotto_op_error(const sotto_op *op, const char **out_text);

typedef struct sotto_op_stats {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t launch_ns;  /* monotonic clock at the call */
  int64_t start_ns;   /* first step ran */
  int64_t end_ns;     /* completed; 0 before */
  uint64_t kernel_ns; /* in kernels of this operation */
  uint64_t payload_bytes_planned; /* what this rank sends in this operation */
  uint64_t header_bytes_planned;
} sotto_op_stats;

/* Times and predicted bytes of one operation.
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT. Since: 0.1 */
SOTTO_API sotto_status sotto_op_report(const sotto_op *op, sotto_op_stats *out_stats);

/* Gives the handle back. Legal at any time; never cancels: the operation runs on and the buffers stay in use until it
 * completes. Using a handle after release is INVALID_ARGUMENT as long as its slot has not been reused.
 *   op [in] NULL: nothing happens
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (released before). Since: 0.1 */
SOTTO_API sotto_status sotto_op_release(sotto_op *op);

/* ---- collectives -------------------------------------------------------------------------------------------- */
/* All ranks of the comm call the same collectives in the same order with the same dtypes, counts, reduction, root and
 * tag: a difference is PROTOCOL on every rank, with both sides named. `in` and `out` are arrays of n buffers handled
 * as one operation; in[i].data == out[i].data means in place, any other overlap is INVALID_ARGUMENT. Counts may be 0.
 * `call` may be NULL. out_op may be NULL: then the call waits for completion itself.
 * Common to all: Threads: one per handle (calls on one comm must not overlap). Blocks: only for a free operation slot,
 * or until completion if out_op is NULL. Stream: reads after work queued on call->stream. Errors: INVALID_ARGUMENT,
 * UNSUPPORTED, BUSY, the comm's own error; the operation's errors: PROTOCOL, TIMEOUT, PEER_LOST, ABORTED, NONFINITE
 * (codecs only). Since: 0.1 */

/* Completes on a rank when every rank has called it. */
SOTTO_API sotto_status sotto_barrier(sotto_comm *comm, const sotto_call *call, sotto_op **out_op);

/* Copies root's buffers to all ranks. in is read on the root alone (may be NULL elsewhere). */
SOTTO_API sotto_status sotto_broadcast(sotto_comm *comm, const sotto_buffer *in, const sotto_buffer *out, uint64_t n,
                                       int32_t root, const sotto_call *call, sotto_op **out_op);

/* out[i] = concatenation of in[i] over ranks; out[i].count = size * in[i].count. In place: in[i].data is this rank's
 * part of out[i]. */
SOTTO_API sotto_status sotto_all_gather(sotto_comm *comm, const sotto_buffer *in, const sotto_buffer *out, uint64_t n,
                                        const sotto_call *call, sotto_op **out_op);

/* out[i] = this rank's part of the reduction of in[i]; in[i].count = size * out[i].count. In place: out[i].data is this
 * rank's part of in[i]. */
SOTTO_API sotto_status sotto_reduce_scatter(sotto_comm *comm, const sotto_buffer *in, const sotto_buffer *out,
                                            uint64_t n, const sotto_call *call, sotto_op **out_op);

/* out[i] = reduction of in[i] over ranks, bit-identical on all ranks. 16-bit floats are summed in fp32 in rank order
 * and rounded once. With call->codec the result is the error-compensated compressed mean. */
SOTTO_API sotto_status sotto_all_reduce(sotto_comm *comm, const sotto_buffer *in, const sotto_buffer *out, uint64_t n,
                                        const sotto_call *call, sotto_op **out_op);

/* Sends n buffers to `peer`. Matched with sotto_recv in call order per (source, destination); tags are compared. */
SOTTO_API sotto_status sotto_send(sotto_comm *comm, const sotto_buffer *in, uint64_t n, int32_t peer,
                                  const sotto_call *call, sotto_op **out_op);

/* Receives n buffers from `peer`; dtypes and counts must equal the sender's. */
SOTTO_API sotto_status sotto_recv(sotto_comm *comm, const sotto_buffer *out, uint64_t n, int32_t peer,
                                  const sotto_call *call, sotto_op **out_op);

/* From here to sotto_group_end, calls on this comm are collected and progress together as one operation; their out_op
 * must be NULL and they return at once. Needed where sends and receives of one rank depend on each other. */
SOTTO_API sotto_status sotto_group_begin(sotto_comm *comm);

/* Starts what was collected as one operation. After an error of a collected call nothing is started and that error is
 * returned here. */
SOTTO_API sotto_status sotto_group_end(sotto_comm *comm, const sotto_call *call, sotto_op **out_op);

/* ---- codec -------------------------------------------------------------------------------------------------- */

/* Creates a codec with the residual state of n tensors, for sotto_all_reduce.
 *   json      [in]  {"type": "1bit", "scale": "l2" | "l1", "granularity": "flat" | "tensor", "chunk_align": 512}
 *   like      [in]  n buffers: dtype and count of the tensors; data is not read
 *   out_codec [out] owned by the caller
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (names the key), UNSUPPORTED, OUT_OF_MEMORY. Since: 0.1 */
SOTTO_API sotto_status sotto_codec_create(sotto_comm *comm, const char *json, const sotto_buffer *like, uint64_t n,
                                          sotto_codec **out_codec);

/* Threads: one per handle. Blocks: no; an operation in flight keeps the state alive. Errors: none. Since: 0.1 */
SOTTO_API sotto_status sotto_codec_destroy(sotto_codec *codec);

/* State modes. exact: everything, continues bit for bit on the same number of ranks. reset: error feedback is left out
 * and starts at zero again. */
typedef int32_t sotto_state_mode;
#define SOTTO_STATE_EXACT 1
#define SOTTO_STATE_RESET 2

/* Exports this rank's residuals into buf, or only their size if buf is NULL or too small.
 *   out_len [out] bytes needed
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (operation in flight). Since: 0.1 */
SOTTO_API sotto_status sotto_codec_state_export(const sotto_codec *codec, sotto_state_mode mode, void *buf,
                                                uint64_t cap, uint64_t *out_len);

/* Replaces this rank's residuals. Nothing changes on error.
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (truncated, damaged, of other tensors, other world size
 * or rank), INVALID_STATE (operation in flight), UNSUPPORTED (newer format). Since: 0.1 */
SOTTO_API sotto_status sotto_codec_state_import(sotto_codec *codec, sotto_state_mode mode, const void *buf,
                                                uint64_t len);

/* ---- plan and configuration --------------------------------------------------------------------------------- */

/* What an operation will send, before anything is sent, as JSON: payload, header and message counts per peer and in
 * total for this rank, steps, scratch bytes.
 *   request [in] {"kind": "all_reduce", "dtype": "fp32", "counts": [n, ...], "reduce": "sum", "root": 0, "in_place":
 *                false, "codec": {...} or absent}
 *   buf, cap, out_len as in sotto_context_report
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (names the key), UNSUPPORTED. Since: 0.1 */
SOTTO_API sotto_status sotto_plan_report(const sotto_comm *comm, const char *request, char *buf, uint64_t cap,
                                         uint64_t *out_len);

/* What a DeepSpeed configuration file will do here, key by key, as JSON; or its error.
 *   json       [in] the text of the file
 *   world_size [in] data-parallel ranks, for the batch arithmetic; 0: unknown
 *   n_params   [in] parameters, for memory and bytes per step; 0: unknown
 *   buf, cap, out_len as in sotto_context_report
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (names the key and a remedy). Since: 0.1 */
SOTTO_API sotto_status sotto_config_report(const char *json, int32_t world_size, uint64_t n_params, char *buf,
                                           uint64_t cap, uint64_t *out_len);

/* ---- optimizer ---------------------------------------------------------------------------------------------- */

/* Creates an optimizer over n parameters, the same on all ranks in names, counts and order (checked by hash).
 * Collective. Parameter values must be equal on all ranks at the first step; the library does not broadcast them.
 *   json      [in]  a whole DeepSpeed file, or just {"optimizer": {...}}. "scheduler" and "gradient_clipping" act inside
 *                   sotto_optim_step. Batch keys are checked when present. Groups: all params use optimizer.params;
 *                   "sotto": {"param_groups": [{...}, ...]} overrides hyper-parameters for group 0, 1, ...
 *   params    [in]  n structs; buffers are borrowed until the optimizer is destroyed
 *   out_optim [out] owned by the caller
 * Threads: one per comm. Blocks: yes, at most the comm's timeout. Errors: INVALID_ARGUMENT (names the key or the
 * parameter), UNSUPPORTED (names what is not built), PROTOCOL (ranks differ), OUT_OF_MEMORY. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_create(sotto_comm *comm, const char *json, const sotto_param *params, uint64_t n,
                                          sotto_optim **out_optim);

/* One optimizer step with the gradients now in the parameters' grad buffers: averages them (full precision, or the
 * compressed momentum), clips, updates the parameters, advances step and learning-rate schedule. Collective. If the
 * operation ends with an error nothing was updated.
 *   call, out_op as for collectives; reduce and codec must be zero
 * Threads: one per handle. Blocks: as collectives. Errors: BUSY (previous step in flight); the operation's: NONFINITE
 * (nothing updated, group healthy) and those of collectives. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_step(sotto_optim *optim, const sotto_call *call, sotto_op **out_op);

/* Sets a number that changes during training: "lr" (overrides the schedule until "lr" is set to NaN), "weight_decay".
 *   group [in] group index, or -1: all groups
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (unknown name, group or value), BUSY. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_set(sotto_optim *optim, const char *name, int32_t group, double value);

/* Hot figures of an optimizer; struct_size in, the rest out. */
typedef struct sotto_optim_info {
  uint32_t struct_size;
  int32_t stage;      /* 0: full-precision (warm-up), 1: compressed */
  uint64_t step;      /* updates done */
  uint64_t state_step; /* step number of checkpoints and schedules: step + step_offset for the 1-bit family */
  double lr;          /* of group 0 for the next step */
  double grad_norm;   /* of the last step, before clipping; mean over ranks in compressed steps; NaN: not computed */
  uint64_t payload_bytes_next_step; /* what this rank will send in the next step */
  uint64_t header_bytes_next_step;
  uint64_t state_bytes; /* memory held */
  uint64_t skipped_steps; /* steps that ended with NONFINITE */
} sotto_optim_info;

/* Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT, BUSY. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_get_info(const sotto_optim *optim, sotto_optim_info *out_info);

/* Report as JSON.
 *   kind [in] NULL or "all"; "config", "groups", "tensors" (trust ratios, factors, scaling coefficients)
 *   buf, cap, out_len as in sotto_context_report
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT, BUSY. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_report(const sotto_optim *optim, const char *kind, char *buf, uint64_t cap,
                                          uint64_t *out_len);

/* Exports this rank's state (parameters included) into buf, or only its size if buf is NULL or too small.
 *   mode    [in]  SOTTO_STATE_EXACT or SOTTO_STATE_RESET
 *   out_len [out] bytes needed
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT, BUSY (step in flight). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_state_export(const sotto_optim *optim, sotto_state_mode mode, void *buf,
                                                uint64_t cap, uint64_t *out_len);

/* Replaces this rank's state, parameters included; nothing changes on error. Stage and counters come from the blob, unless
 * freeze_step of this configuration says otherwise.
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (truncated, damaged, other tensors, other algorithm, for
 * EXACT: other world size, rank, chunk_align or granularity), BUSY, UNSUPPORTED (newer format). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_state_import(sotto_optim *optim, sotto_state_mode mode, const void *buf,
                                                uint64_t len);

/* Threads: one per handle. Blocks: waits for a step in flight at most its deadline. Errors: none. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_destroy(sotto_optim *optim);

#ifdef __cplusplus
}
#endif

#endif /* SOTTO_SOTTO_H */
