/* sotto.h - the C interface of libsotto, a library that lets distributed training talk less.
 *
 * One rank is one sotto_context (several per process are allowed: ranks as threads). Ranks find
 * each other through a sotto_unique_id or a launcher's environment and form a sotto_comm.
 * Collectives and optimizer steps are asynchronous operations (sotto_op). Configuration is JSON
 * text in DeepSpeed's words; reports are JSON text too.
 *
 * Conventions that hold for every function:
 *   - The return value is a sotto_status: SOTTO_OK, a positive "not yet", or a negative SOTTO_E_...
 *     code; then sotto_last_error() has the text. Outputs (out_*) are written only on success.
 *   - Structs that the caller fills start with struct_size (set it to sizeof, or use the
 *     SOTTO_..._INIT macro). A field that is all zero means its default. Fields that this library
 *     does not know must be zero: UNSUPPORTED otherwise.
 *   - Handles are opaque. _destroy(NULL) and _release(NULL) do nothing. Children keep their parent
 *     alive, so the order of destruction does not matter. A handle that has been destroyed or
 *     released is recognised as such (INVALID_ARGUMENT) until its slot has been used again many
 *     times (64 times as many handles of that kind as there were ever at once, at least 16384).
 *   - Time-outs are microseconds. Negative means no limit, wherever a time-out is taken. 0 means
 *     the default in a struct, and "do not wait" in a function that waits.
 *   - Strings are UTF-8 and end with a zero byte; strings passed in are copied during the call.
 *   - The child of a fork() cannot use the handles of its parent: INVALID_STATE. It can exec.
 *   - No function throws, prints in place of returning, exits the process, or installs a signal
 *     handler.
 *
 * Tags in the comments:
 *   - [in], [out], [in,out] with a parameter: who writes it. A pointer may be NULL only where the
 *     text says so. What a pointer leads to belongs to the caller unless the text says so.
 *   - Threads: "any" = any thread at any time; "one per handle" = calls on one handle must not
 *     overlap; "not from callbacks" = INVALID_STATE inside a callback of this library.
 *   - Blocks: whether the call may wait for other ranks. Every wait has a deadline, unless the
 *     caller has set a negative time-out.
 *   - Stream: how the call orders itself against sotto_call.stream; ignored for host memory. A
 *     function that has no such line and reads or writes tensors does it at once: work that the
 *     caller has queued on device memory has to be done before.
 *   - Errors: codes that the function returns beside OUT_OF_MEMORY, INTERNAL and, where it takes a
 *     handle or a pointer that must not be NULL, INVALID_ARGUMENT for NULL.
 *   - Since: ABI version.
 */
#ifndef SOTTO_SOTTO_H
#define SOTTO_SOTTO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ABI version: major << 16 | minor. While the major is 0 a minor may break: what is promised is
 * that a client works with a library of the same major and the same minor. A library also takes
 * clients of those earlier minors that its own breaks nothing of, and refuses all others, later
 * ones always, with UNSUPPORTED (sotto_context_create) and a text with both versions. From major 1
 * on a client works with a library of the same major and the same or a later minor. */
#define SOTTO_ABI_MAJOR 0
#define SOTTO_ABI_MINOR 2
#define SOTTO_ABI_VERSION ((uint32_t)((SOTTO_ABI_MAJOR << 16) | SOTTO_ABI_MINOR))

#if defined(__GNUC__)
#define SOTTO_API __attribute__((visibility("default")))
#else
#define SOTTO_API
#endif

/* ---- status --------------------------------------------------------------------------------- */

typedef int32_t sotto_status;
#define SOTTO_OK 0                    /* done */
#define SOTTO_IN_PROGRESS 1           /* not finished: poll or wait */
#define SOTTO_E_INVALID_ARGUMENT (-1) /* caller bug: fix the program */
#define SOTTO_E_INVALID_STATE (-2)    /* wrong order of calls: fix the program */
#define SOTTO_E_UNSUPPORTED (-3)      /* unknown or not compiled in: the text names it */
#define SOTTO_E_OUT_OF_MEMORY (-4)    /* free something, retry */
#define SOTTO_E_BUSY (-5)             /* local resource in use: retry later */
#define SOTTO_E_TIMEOUT (-6)          /* group failed: abort, rebuild, resume from saved state */
#define SOTTO_E_PEER_LOST (-7)        /* group failed: abort, rebuild, resume from saved state */
#define SOTTO_E_ABORTED (-8)          /* a rank aborted the group: rebuild and resume */
#define SOTTO_E_PROTOCOL (-9)         /* ranks disagree, or a frame is corrupt or unknown */
#define SOTTO_E_TRANSPORT (-10)       /* local network failure */
#define SOTTO_E_DEVICE (-11)          /* local device failure */
#define SOTTO_E_INTERNAL (-12)        /* a bug of this library: report it */
#define SOTTO_E_NONFINITE (-13)       /* NaN or Inf: nothing was updated, the group is healthy */
#define SOTTO_E_CANCELLED (-14)       /* withdrawn by a rank or the caller: the group is healthy */

/* ---- dtypes, devices, reductions ------------------------------------------------------------ */

typedef uint32_t sotto_dtype; /* DLPack: code | bits << 8 | lanes << 16 */
#define SOTTO_INT8 0x00010800u
#define SOTTO_INT16 0x00011000u
#define SOTTO_INT32 0x00012000u
#define SOTTO_INT64 0x00014000u
#define SOTTO_UINT8 0x00010801u
#define SOTTO_UINT16 0x00011001u
#define SOTTO_UINT32 0x00012001u
#define SOTTO_UINT64 0x00014001u
#define SOTTO_FLOAT16 0x00011002u
#define SOTTO_FLOAT32 0x00012002u
#define SOTTO_FLOAT64 0x00014002u
#define SOTTO_BFLOAT16 0x00011004u

typedef int32_t sotto_device_type; /* DLPack's numbers */
#define SOTTO_DEVICE_CPU 1
#define SOTTO_DEVICE_CUDA 2      /* memory of the CUDA device with number device_id */
#define SOTTO_DEVICE_CUDA_HOST 3 /* host memory that CUDA has pinned: as the CPU's */

typedef int32_t sotto_reduce_op;
#define SOTTO_REDUCE_DEFAULT 0 /* sum */
#define SOTTO_REDUCE_SUM 1     /* integers wrap around */
#define SOTTO_REDUCE_MEAN 2    /* integers: no overflow, towards zero (-3 / 2 is -1) by levels */
#define SOTTO_REDUCE_MIN 3     /* NaN if any rank has one */
#define SOTTO_REDUCE_MAX 4     /* NaN if any rank has one */
#define SOTTO_REDUCE_PROD 5    /* integers wrap around */
#define SOTTO_REDUCE_BIT_OR 6  /* integers only */

/* ---- handles -------------------------------------------------------------------------------- */

typedef struct sotto_context sotto_context;
typedef struct sotto_comm sotto_comm;
typedef struct sotto_op sotto_op;
typedef struct sotto_codec sotto_codec;
typedef struct sotto_optim sotto_optim;
typedef struct sotto_outer sotto_outer;
typedef struct sotto_overlap sotto_overlap;

/* ---- structs -------------------------------------------------------------------------------- */

/* A borrowed view of contiguous memory; frozen at 32 bytes. The caller keeps the memory alive and
 * does not touch it from the call until the operation has completed. All buffers of a call, of a
 * group and of an optimizer are on one device. A rank may use another device than its peers. */
typedef struct sotto_buffer {
  void* data;                    /* aligned to the element size; NULL only if count is 0 */
  uint64_t count;                /* elements */
  sotto_dtype dtype;             /* SOTTO_FLOAT32, ... */
  sotto_device_type device_type; /* SOTTO_DEVICE_CPU, ...; 0 means CPU */
  int32_t device_id;             /* number of the CUDA device; 0 for the CPU */
  uint32_t flags;                /* must be 0 */
} sotto_buffer;
#define SOTTO_BUFFER_INIT \
  { NULL, 0, 0, 0, 0, 0 }

#define SOTTO_UNIQUE_ID_BYTES 128
typedef struct sotto_unique_id {
  uint8_t bytes[SOTTO_UNIQUE_ID_BYTES];
} sotto_unique_id;
#define SOTTO_UNIQUE_ID_INIT \
  {                          \
    { 0 }                    \
  }

typedef struct sotto_context_config {
  uint32_t struct_size;
  uint32_t no_progress_thread; /* 1: no thread of its own; the caller drives sotto_context_poll, and
                                  gives signs of life to other ranks inside calls alone */
  uint32_t cpu_threads;        /* for CPU kernels; 0: SOTTO_CPU_THREADS, else cores / local ranks */
  uint32_t max_ops;            /* operations in flight at most; 0: 1024 */
} sotto_context_config;
#define SOTTO_CONTEXT_CONFIG_INIT \
  { sizeof(sotto_context_config), 0, 0, 0 }

/* All-gather that the caller supplies to set a comm up over a launcher of its own: writes `bytes`
 * bytes of every rank, in rank order, to `out`. Returns 0 on success. Called on the thread that
 * creates the comm, only during that call; must not call back into the library. */
typedef int32_t (*sotto_all_gather_fn)(void* user, const void* in, uint64_t bytes, void* out);

typedef struct sotto_comm_config {
  uint32_t struct_size;
  int32_t rank;                   /* 0 .. size-1; must be 0 if size is 0 */
  int32_t size;                   /* ranks; 0: rank and size from the launcher's environment */
  uint32_t reserved;              /* must be 0 */
  const sotto_unique_id* id;      /* NULL: SOTTO_RENDEZVOUS or the launcher's environment */
  const char* transport;          /* "auto" (NULL): SOTTO_TRANSPORT; "tcp" or another one that
                                     sotto_build_info lists */
  int64_t timeout_us;             /* of set-up; default of operations; 0: SOTTO_TIMEOUT_US (300 s);
                                     negative: no limit */
  sotto_all_gather_fn all_gather; /* NULL: own rendezvous; else used in place of `id` */
  void* user;                     /* passed to all_gather */
  /* With transport "nccl": this rank's ncclComm_t, of the same rank and size, lent until the comm
   * is destroyed or has failed; no other code uses it meanwhile. A failure aborts it, which frees
   * it: the caller must not touch it any more. NULL: the library makes one. All ranks, or none. */
  void* native_comm;
} sotto_comm_config;
#define SOTTO_COMM_CONFIG_INIT \
  { sizeof(sotto_comm_config), 0, 0, 0, NULL, NULL, 0, NULL, NULL, NULL }

/* Called once when the operation has completed, on the thread that waits, tests or calls
 * sotto_context_poll, unless SOTTO_CALL_DONE_ANY_THREAD is set: then also on the library's own
 * thread; by sotto_comm_destroy at the latest. Calls outside of it see the operation in progress
 * until it has returned. Must not call the library, except for sotto_op_error and sotto_op_test. */
typedef void (*sotto_done_fn)(void* user, sotto_status status);

#define SOTTO_CALL_DONE_ANY_THREAD 1u /* on_done may run on the library's own thread */
#define SOTTO_CALL_NO_BLOCK 2u        /* BUSY instead of waiting for a free operation slot */

/* The parts of one tensor in sotto_all_to_all: what goes to each rank, and where lies what comes
 * from it. sotto_all_gather_v has parts in `out` alone, sotto_reduce_scatter_v in `in`: the arrays
 * of the other side are NULL. Every array has one number per rank of the comm, in elements, and is
 * read during the call only. In an array of structs the stride is the first element's
 * struct_size. */
typedef struct sotto_parts {
  uint32_t struct_size;
  uint32_t reserved;           /* must be 0 */
  const uint64_t* in_counts;   /* elements that go to each rank; 0 is allowed; not NULL */
  const uint64_t* in_offsets;  /* where they begin in `in`; NULL: one behind the other, from 0 */
  const uint64_t* out_counts;  /* elements that come from each rank; 0 is allowed; not NULL */
  const uint64_t* out_offsets; /* where they begin in `out`; NULL: one behind the other, from 0 */
} sotto_parts;
#define SOTTO_PARTS_INIT \
  { sizeof(sotto_parts), 0, NULL, NULL, NULL, NULL }

/* Priorities from here down are background work, for operations that may take long beside others:
 * on CUDA devices it has streams of its own, so that nothing queues up behind it; on TCP it gets at
 * least SOTTO_BACKGROUND_SHARE percent of the bytes to a peer while others have as much to send, so
 * that it goes on. NCCL executes messages in the order of the calls, whatever their priority.
 * Since: 0.2 */
#define SOTTO_PRIORITY_BACKGROUND (-1000)

/* What may vary per call. NULL or all zero: defaults. */
typedef struct sotto_call {
  uint32_t struct_size;
  uint32_t flags;         /* SOTTO_CALL_... */
  uint64_t tag;           /* must be equal on all ranks of the operation (checked) */
  void* stream;           /* a cudaStream_t of the buffers' device, NULL its default stream: the
                             operation starts after work queued on it; ignored for host memory.
                             INVALID_STATE while it is captured into a CUDA graph, of which
                             sotto_optim_step alone can be a part (sotto_optim_replay) */
  int64_t timeout_us;     /* longest time without progress; 0: the comm's; negative: no limit */
  int32_t priority;       /* larger is more urgent; equal on all ranks; 0 is normal;
                             SOTTO_PRIORITY_BACKGROUND and less: see there */
  sotto_reduce_op reduce; /* 0 is sum. With a codec: 0 or mean, and the result is the mean.
                             sotto_overlap_begin: 0 is mean */
  sotto_codec* codec;     /* how the data is encoded on the wire; NULL: as it is */
  sotto_done_fn on_done;  /* may be NULL */
  void* user;             /* passed to on_done */
} sotto_call;
#define SOTTO_CALL_INIT \
  { sizeof(sotto_call), 0, 0, NULL, 0, 0, 0, NULL, NULL, NULL }

/* One tensor of an optimizer. In an array the stride is the first element's struct_size. */
typedef struct sotto_param {
  uint32_t struct_size;
  uint32_t group;          /* index into the optimizer's parameter groups (sotto_optim_create) */
  const char* name;        /* unique, at most 255 bytes; NULL: "param<index>" */
  sotto_buffer param;      /* fp32 master, updated in place */
  sotto_buffer grad;       /* fp32, fp16 or bf16 (all params alike), same count; never written: mean
                              over this rank's samples, times the loss scale if there is one */
  sotto_buffer model_copy; /* fp16 or bf16 (all alike), same count: written at the end of each step
                              that updates, rounded to nearest even; count 0: none */
  sotto_buffer mask;       /* uint8, same count, 0 or 1: 0 takes no part; count 0: none */
  uint64_t models;         /* 0 or 1 */
} sotto_param;
#define SOTTO_PARAM_INIT                                                                   \
  {                                                                                        \
    sizeof(sotto_param), 0, NULL, SOTTO_BUFFER_INIT, SOTTO_BUFFER_INIT, SOTTO_BUFFER_INIT, \
        SOTTO_BUFFER_INIT, 0                                                               \
  }

/* One array of a DeepSpeed checkpoint (sotto_optim_state_import_arrays). In an array of structs the
 * stride is the first element's struct_size. */
typedef struct sotto_named_array {
  uint32_t struct_size;
  uint32_t reserved;   /* must be 0 */
  const char* name;    /* not NULL */
  sotto_buffer values; /* only read; a single number is an array of one element */
} sotto_named_array;
#define SOTTO_NAMED_ARRAY_INIT \
  { sizeof(sotto_named_array), 0, NULL, SOTTO_BUFFER_INIT }

/* ---- library -------------------------------------------------------------------------------- */

/* ABI version of the loaded library: major << 16 | minor.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API uint32_t sotto_abi_version(void);

/* Version of the loaded library, "0.2.0". The string lives as long as the library.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char* sotto_version_string(void);

/* What was compiled in, as JSON: transports, devices, codecs, optimizers, SIMD targets, compiler.
 * The string lives as long as the library.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char* sotto_build_info(void);

/* Name of a status code without prefix: "OK", "PEER_LOST"; "UNKNOWN" for any other number. The
 * string lives as long as the library.
 *   status [in] any number
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char* sotto_status_name(sotto_status status);

/* Text of this thread's last call that returned an error, "" after one that did not. Valid until
 * this thread's next call of a function that returns a sotto_status. Operations and comms keep
 * their own text beside it: sotto_op_error, sotto_comm_error.
 * Threads: any. Blocks: no. Errors: none. Since: 0.1 */
SOTTO_API const char* sotto_last_error(void);

/* Log sink; level: 1 error, 2 warning, 3 info, 4 debug, 5 trace. May be called on any thread of the
 * process. Must not call back into the library. */
typedef void (*sotto_log_fn)(void* user, int32_t level, const char* message);

/* Sends the log of the whole process to fn instead of standard error. A message that another thread
 * is writing meanwhile may still reach the old sink.
 *   fn    [in] NULL: standard error again
 *   user  [in] passed to fn; may be NULL; borrowed until the sink is replaced
 *   level [in] messages above it are dropped; 0: SOTTO_LOG, else 2 (warning)
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (level not 0..5, bad SOTTO_LOG). Since: 0.1 */
SOTTO_API sotto_status sotto_set_log(sotto_log_fn fn, void* user, int32_t level);

/* ---- context -------------------------------------------------------------------------------- */

/* Creates the context of one rank: devices, progress thread, parameters from SOTTO_* variables. Use
 * sotto_context_create, which passes the version this header was compiled with.
 *   abi_version [in]  SOTTO_ABI_VERSION
 *   config      [in]  NULL: defaults
 *   out_context [out] owned by the caller: sotto_context_destroy
 * Threads: any, not from callbacks. Blocks: no. Errors: INVALID_ARGUMENT (a bad field or SOTTO_*
 * value), UNSUPPORTED (abi_version, newer field), INVALID_STATE (forked from a process that had a
 * context). Since: 0.1 */
SOTTO_API sotto_status sotto_context_create_v(uint32_t abi_version,
                                              const sotto_context_config* config,
                                              sotto_context** out_context);

/* sotto_context_create_v with the version of this header.
 *   config      [in]  NULL: defaults
 *   out_context [out] owned by the caller: sotto_context_destroy
 * Threads: any, not from callbacks. Blocks: no. Errors: as sotto_context_create_v. Since: 0.1 */
static inline sotto_status sotto_context_create(const sotto_context_config* config,
                                                sotto_context** out_context) {
  return sotto_context_create_v(SOTTO_ABI_VERSION, config, out_context);
}

/* Destroys the caller's reference. Comms that still use the context keep it working until they are
 * destroyed.
 *   context [in] NULL: nothing happens
 * Threads: any, not from callbacks. Blocks: no. Errors: INVALID_STATE (fork, callback). Since:
 * 0.1 */
SOTTO_API sotto_status sotto_context_destroy(sotto_context* context);

/* Makes progress on everything in flight, and runs callbacks that are due. Needed only with
 * no_progress_thread, or to have callbacks run here.
 *   context    [in]
 *   timeout_us [in] 0: do what is ready and return; > 0: wait at most so long for something to
 *                   happen; negative: until something happens, also if nothing is in flight
 * Threads: any, not from callbacks. Blocks: at most timeout_us. Errors: INVALID_STATE (fork,
 * callback). Since: 0.1 */
SOTTO_API sotto_status sotto_context_poll(sotto_context* context, int64_t timeout_us);

/* Report as JSON: version, devices, transports, SIMD target, parameters in force.
 *   context [in]
 *   kind    [in]  NULL or "all"
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero: cap has to be larger than this
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind), INVALID_STATE (fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_context_report(const sotto_context* context, const char* kind,
                                            char* buf, uint64_t cap, uint64_t* out_len);

/* Puts work of the trainer into the time line that SOTTO_TRACE asks for, in a row of its own.
 * Without one nothing happens.
 *   context  [in]
 *   name     [in] UTF-8, of which 200 bytes are kept; copied
 *   begin_ns [in] monotonic clock, as in sotto_op_stats
 *   end_ns   [in] >= begin_ns
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (name, end_ns), INVALID_STATE (fork).
 * Since: 0.2 */
SOTTO_API sotto_status sotto_trace_span(sotto_context* context, const char* name, int64_t begin_ns,
                                        int64_t end_ns);

/* ---- unique id ------------------------------------------------------------------------------ */

/* Makes an id with which ranks find each other, and listens for them: call it on one rank, carry
 * the 128 bytes to the others by any means, and let every rank pass them to sotto_comm_create. One
 * id makes one comm. The rank that made the id must become a member (any rank number). Listens on
 * loopback unless SOTTO_LISTEN says otherwise. SOTTO_TRANSPORT decides for which transport it is;
 * with auto ranks meet by TCP. Pairs of one process or one host then go on through memory.
 *   context [in]  keeps listening until the comm is made or the context is destroyed
 *   out_id  [out] 128 bytes without pointers; may be copied freely
 * Threads: any, not from callbacks. Blocks: no. Errors: TRANSPORT (cannot listen), INVALID_STATE
 * (fork, callback). Since: 0.1 */
SOTTO_API sotto_status sotto_unique_id_create(sotto_context* context, sotto_unique_id* out_id);

/* ---- comm ----------------------------------------------------------------------------------- */

/* Creates a comm: an ordered set of ranks. Collective: every rank calls it. A comm of one
 * rank connects to none: it needs no id and ignores a rendezvous address.
 *   context  [in]  stays alive until the comm is destroyed
 *   config   [in]  NULL: rank, size and rendezvous from the environment (SOTTO_RANK,
 *                  SOTTO_WORLD_SIZE and SOTTO_RENDEZVOUS as sotto-run sets them; else torchrun's,
 *                  Open MPI's, MPICH's or Slurm's)
 *   out_comm [out] owned by the caller: sotto_comm_destroy
 * Threads: any, not from callbacks. Blocks: yes, at most config.timeout_us. Errors:
 * INVALID_ARGUMENT (two ranks with one number, sizes that differ, rank out of range, an id that was
 * used before, bad environment), TIMEOUT (who is missing), PEER_LOST, PROTOCOL (version), TRANSPORT
 * (address not reachable), UNSUPPORTED (transport, newer field), INVALID_STATE (fork, callback).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_comm_create(sotto_context* context, const sotto_comm_config* config,
                                         sotto_comm** out_comm);

/* Splits a comm. Ranks with the same color form a new comm, ordered by key, then by rank.
 * Connections are shared with the parent; a failure of one is a failure of all comms of that root.
 * Collective over the parent.
 *   comm     [in]
 *   color    [in]  >= 0, or -1: this rank gets no comm (out_comm becomes NULL)
 *   key      [in]  order inside the new comm
 *   out_comm [out] owned by the caller: sotto_comm_destroy
 * Threads: one per handle, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (color), INVALID_STATE (inside a group, fork, callback), PROTOCOL, TIMEOUT,
 * PEER_LOST, TRANSPORT (NCCL), ABORTED. Since: 0.1 */
SOTTO_API sotto_status sotto_comm_split(sotto_comm* comm, int32_t color, int32_t key,
                                        sotto_comm** out_comm);

/* Rank of the caller in the comm.
 *   comm     [in]
 *   out_rank [out] 0 .. size-1
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (NULL), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_rank(const sotto_comm* comm, int32_t* out_rank);

/* Number of ranks of the comm.
 *   comm     [in]
 *   out_size [out] >= 1
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (NULL), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_size(const sotto_comm* comm, int32_t* out_size);

/* Fails the comm and all comms of its root on every rank: operations in flight end with ABORTED.
 * All ranks report the same cause: of several ranks that fail at the same time, the first.
 *   comm   [in]
 *   reason [in] text that every rank will read; may be NULL
 * Threads: any, not from callbacks. Blocks: until this rank knows the cause that counts, a fraction
 * of a second; 2 s if rank 0 of the root does not answer. Errors: INVALID_STATE (fork, callback).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_comm_abort(sotto_comm* comm, const char* reason);

/* The first cause of failure: SOTTO_OK while the comm is healthy. The return value is the state of
 * the comm.
 *   comm     [in]
 *   out_text [out] may be NULL; else text that lives as long as the handle ("" while healthy)
 * Threads: any. Blocks: no. Errors: the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_comm_error(const sotto_comm* comm, const char** out_text);

/* Report as JSON.
 *   comm    [in]
 *   kind    [in]  NULL or "all"; "counters" (bytes and messages per peer), "routes", "waiting" (who
 *                 waits for whom). After a failure "all" names ranks of the root comm: "accused",
 *                 "reported_by"; -1: not known
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero; counters go on, so it may be more in the
 *                 next call: ask until cap is larger
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind), INVALID_STATE (fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_comm_report(const sotto_comm* comm, const char* kind, char* buf,
                                         uint64_t cap, uint64_t* out_len);

/* Counters of one comm (not of its root or splits), as measured at the transport. struct_size in,
 * the rest out. */
typedef struct sotto_comm_counters {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t payload_bytes_sent; /* data; equals the plans' prediction exactly */
  uint64_t payload_bytes_received;
  uint64_t header_bytes_sent; /* frame headers, trailers, scales, flags; predicted exactly too */
  uint64_t header_bytes_received;
  uint64_t service_bytes_sent; /* flow control; bounded, not predicted */
  uint64_t service_bytes_received;
  uint64_t messages_sent;
  uint64_t messages_received;
  uint64_t payload_bytes_planned; /* prediction of what the completed operations sent from here */
  uint64_t header_bytes_planned;
  uint64_t kernel_ns; /* in kernels of this comm's operations */
  uint64_t ops_completed;
} sotto_comm_counters;
#define SOTTO_COMM_COUNTERS_INIT \
  { sizeof(sotto_comm_counters), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Reads the counters of the comm.
 *   comm         [in]
 *   out_counters [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (struct_size), INVALID_STATE (fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_comm_get_counters(const sotto_comm* comm,
                                               sotto_comm_counters* out_counters);

/* Destroys the comm: waits for operations in flight at most the comm's timeout, then fails those
 * left; if the comm has failed a fraction of a second in all, over NCCL until NCCL has aborted it
 * (10 seconds at most). What is queued on a device behind a caller's stream keeps its memory until
 * the stream has come to it, and so long this waits. Not collective. The handle is gone whatever is
 * returned, except for INVALID_STATE.
 *   comm [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: yes. Errors: the first error met while
 * draining, INVALID_STATE (fork, callback). Since: 0.1 */
SOTTO_API sotto_status sotto_comm_destroy(sotto_comm* comm);

/* ---- operations ----------------------------------------------------------------------------- */
/* The codes of an operation itself: PROTOCOL, TIMEOUT, PEER_LOST, ABORTED, TRANSPORT, DEVICE,
 * NONFINITE. */

/* SOTTO_OK or the operation's error when it has completed, SOTTO_IN_PROGRESS before. Makes some
 * progress itself.
 *   op [in]
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (released), INVALID_STATE (fork), the
 * operation's. Since: 0.1 */
SOTTO_API sotto_status sotto_op_test(sotto_op* op);

/* Waits for completion. The waiting thread does the work itself.
 *   op         [in]
 *   timeout_us [in] time over: SOTTO_IN_PROGRESS, nothing changes; negative: no limit, until the
 *                   operation ends, for which its own deadline provides (sotto_call.timeout_us,
 *                   else the comm's). On a device it ends when what it has queued has executed,
 *                   so not before the caller's stream has come to it
 * Threads: any, not from callbacks. Blocks: yes. Errors: INVALID_ARGUMENT (released), INVALID_STATE
 * (fork, callback), the operation's. Since: 0.1 */
SOTTO_API sotto_status sotto_op_wait(sotto_op* op, int64_t timeout_us);

/* Waits until one of n operations has completed. All belong to one context.
 *   ops        [in]  n handles; NULL entries are skipped, but not all may be NULL
 *   n          [in]  > 0
 *   timeout_us [in]  time over: SOTTO_IN_PROGRESS; negative: no limit, until one ends
 *   out_index  [out] the lowest index that has completed
 * Threads: any, not from callbacks. Blocks: yes. Errors: INVALID_ARGUMENT (released, none, several
 * contexts), INVALID_STATE (fork, callback). The operation's own error is not returned: ask
 * sotto_op_test. Since: 0.1 */
SOTTO_API sotto_status sotto_op_wait_any(sotto_op* const* ops, uint64_t n, int64_t timeout_us,
                                         uint64_t* out_index);

/* Waits until all of n operations have completed, also if some fail. All belong to one context.
 *   ops        [in] n handles; NULL entries are skipped. May be NULL if n is 0
 *   n          [in] 0: nothing to wait for
 *   timeout_us [in] of all together; time over: SOTTO_IN_PROGRESS, nothing changes, and some may
 *                   have completed: ask sotto_op_test; negative: no limit, until all have ended
 * Threads: any, not from callbacks. Blocks: yes. Errors: INVALID_ARGUMENT (released, several
 * contexts), INVALID_STATE (fork, callback), and that of the first of the n operations that has
 * failed: the text names its index. Since: 0.2 */
SOTTO_API sotto_status sotto_op_wait_all(sotto_op* const* ops, uint64_t n, int64_t timeout_us);

/* Orders work that the caller queues on a stream from now on after the operation, also if that
 * fails: the stream does not know, ask sotto_op_wait or sotto_op_error. A step that was left out or
 * not finite leaves the parameters as they were. If a comm over NCCL fails, its streams go on at
 * once, since NCCL could not end otherwise: what the operation had queued may still be under way
 * until sotto_op_wait has returned.
 * Returns when all of the operation is queued on the device. Over NCCL that is soon, and other
 * ranks need not have called, unless its own counts (sotto_all_to_all with parts) or an earlier
 * operation wait for them. Where the host has to do a part (messages by TCP) the thread waits for
 * that part. With SOTTO_STREAM_BLOCK=1 the stream waits in its place, under the conditions that
 * `sotto info` lists.
 *   op     [in]
 *   stream [in] a cudaStream_t of the operation's device, NULL: its default stream
 * Threads: any. Blocks: until the operation is queued. Stream: what is queued on it later waits for
 * the operation. Errors: UNSUPPORTED (operation on host memory: there is no stream;
 * SOTTO_STREAM_BLOCK without its conditions, or with a driver older than CUDA 12), DEVICE,
 * INVALID_ARGUMENT (released), INVALID_STATE (fork; the stream is being captured into a CUDA graph;
 * a captured operation; in a callback while the host has a part to do). Since: 0.1 */
SOTTO_API sotto_status sotto_op_stream_wait(sotto_op* op, void* stream);

/* The operation's own status (SOTTO_IN_PROGRESS before completion) and text.
 *   op       [in]
 *   out_text [out] may be NULL; else text that lives until sotto_op_release ("" without error)
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (released), INVALID_STATE (fork), the
 * operation's. Since: 0.1 */
SOTTO_API sotto_status sotto_op_error(const sotto_op* op, const char** out_text);

/* Times and bytes of one operation. struct_size in, the rest out. */
typedef struct sotto_op_stats {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t launch_ns;  /* monotonic clock at the call */
  int64_t start_ns;   /* first step ran; 0 before completion */
  int64_t end_ns;     /* completed; 0 before */
  uint64_t kernel_ns; /* in kernels of this operation, on a device that runs them at once */
  uint64_t payload_bytes_planned; /* what this rank sends in this operation */
  uint64_t header_bytes_planned;
  int64_t exposed_ns; /* threads have stood still for it in sotto_op_wait and the like; -1: a stream
                         waits for it, whose time the host does not know. Since: 0.2 */
} sotto_op_stats;
#define SOTTO_OP_STATS_INIT \
  { sizeof(sotto_op_stats), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Times and predicted bytes of one operation.
 *   op        [in]
 *   out_stats [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (released, struct_size), INVALID_STATE (fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_op_get_stats(const sotto_op* op, sotto_op_stats* out_stats);

/* Gives the handle back. Legal at any time; never cancels: the operation runs on and the buffers
 * stay in use until it completes.
 *   op [in] NULL: nothing happens
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (released before), INVALID_STATE (fork).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_op_release(sotto_op* op);

/* ---- collectives ---------------------------------------------------------------------------- */
/* All ranks of the comm call the same collectives in the same order with the same dtypes, counts,
 * reduction, root and tag (in sotto_all_to_all with parts counts may differ, but fit in pairs): a
 * difference is PROTOCOL on every rank, with both sides named; in its next call on a rank that had
 * completed by then, as the root of a broadcast. Over NCCL that order is one over all comms of a
 * context: ranks that share two comms make their calls on both in one order, or wait for each other
 * until the timeout. `in` and `out` are arrays of n buffers handled as one operation; in[i].data ==
 * out[i].data: in place; other overlaps with written memory: INVALID_ARGUMENT. n, counts may be 0.
 *
 * The same for all of them, "the common errors": INVALID_ARGUMENT (buffers, counts, root, peer,
 * call), UNSUPPORTED (dtype, device, newer field of call), BUSY (SOTTO_CALL_NO_BLOCK; with it unset
 * max_ops in flight for longer than the timeout), INVALID_STATE (fork, callback), and the comm's
 * own error if it has failed. If out_op is NULL the call waits for completion itself and returns
 * the operation's error too. A collective that has started and ends with an error leaves the
 * buffers that it writes with unspecified contents. */

/* Completes on a rank when every rank has called it.
 *   comm   [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: none. Errors: the common errors. Since: 0.1 */
SOTTO_API sotto_status sotto_barrier(sotto_comm* comm, const sotto_call* call, sotto_op** out_op);

/* Copies root's buffers to all ranks.
 *   comm   [in]
 *   in     [in]  n buffers, read on the root alone; may be NULL elsewhere. On the root in[i] may be
 *                out[i]
 *   out    [in]  n buffers, written on every rank
 *   n      [in]
 *   root   [in]  rank, 0 .. size-1
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_broadcast(sotto_comm* comm, const sotto_buffer* in,
                                       const sotto_buffer* out, uint64_t n, int32_t root,
                                       const sotto_call* call, sotto_op** out_op);

/* out[i] = concatenation of in[i] over ranks.
 *   comm   [in]
 *   in     [in]  n buffers. In place: in[i].data is this rank's part of out[i]
 *   out    [in]  n buffers, written; out[i].count = size * in[i].count
 *   n      [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_all_gather(sotto_comm* comm, const sotto_buffer* in,
                                        const sotto_buffer* out, uint64_t n, const sotto_call* call,
                                        sotto_op** out_op);

/* out[i] = the parts of all ranks, which may have different counts. No word about counts is sent:
 * they are the same on all ranks. What lies between parts is not touched.
 *   comm   [in]
 *   in     [in]  n buffers, this rank's parts: in[i].count = parts[i].out_counts[rank]. In place:
 *                in[i].data is where this rank's part of out[i] lies
 *   out    [in]  n buffers of the same dtypes, written; part r comes from rank r
 *   n      [in]
 *   parts  [in]  n structs; out_counts are the same on all ranks, out_offsets a rank's own matter;
 *                in_counts and in_offsets must be NULL. The parts of an out[i] do not overlap
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors; INVALID_ARGUMENT also for parts that leave their buffer or overlap. Since: 0.2 */
SOTTO_API sotto_status sotto_all_gather_v(sotto_comm* comm, const sotto_buffer* in,
                                          const sotto_buffer* out, uint64_t n,
                                          const sotto_parts* parts, const sotto_call* call,
                                          sotto_op** out_op);

/* out[i] = this rank's part of the reduction of in[i] over ranks.
 *   comm   [in]
 *   in     [in]  n buffers; in[i].count = size * out[i].count
 *   out    [in]  n buffers, written. In place: out[i].data is this rank's part of in[i]
 *   n      [in]
 *   call   [in]  may be NULL; reduce as in sotto_all_reduce, codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_reduce_scatter(sotto_comm* comm, const sotto_buffer* in,
                                            const sotto_buffer* out, uint64_t n,
                                            const sotto_call* call, sotto_op** out_op);

/* out[i] = this rank's part of the reduction of in[i] over ranks; parts may have different counts.
 *   comm   [in]
 *   in     [in]  n buffers; part r goes to rank r. What lies between parts is not read
 *   out    [in]  n buffers of the same dtypes, written: out[i].count = parts[i].in_counts[rank]. In
 *                place: out[i].data is where this rank's part of in[i] lies, which no other part
 *                overlaps
 *   n      [in]
 *   parts  [in]  n structs; in_counts are the same on all ranks, in_offsets a rank's own matter;
 *                out_counts and out_offsets must be NULL
 *   call   [in]  may be NULL; reduce as in sotto_all_reduce, codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors; INVALID_ARGUMENT also for parts that leave their buffer. Since: 0.2 */
SOTTO_API sotto_status sotto_reduce_scatter_v(sotto_comm* comm, const sotto_buffer* in,
                                              const sotto_buffer* out, uint64_t n,
                                              const sotto_parts* parts, const sotto_call* call,
                                              sotto_op** out_op);

/* out[i] on the root = reduction of in[i] over ranks, with the bits that sotto_all_reduce has.
 *   comm   [in]
 *   in     [in]  n buffers, with the same dtypes and counts on all ranks
 *   out    [in]  n buffers of the same dtypes and counts, written on the root alone; there
 *                out[i].data may be in[i].data. Not read elsewhere: may be NULL there
 *   n      [in]
 *   root   [in]  rank, 0 .. size-1
 *   call   [in]  may be NULL; reduce as in sotto_all_reduce, codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.2 */
SOTTO_API sotto_status sotto_reduce(sotto_comm* comm, const sotto_buffer* in,
                                    const sotto_buffer* out, uint64_t n, int32_t root,
                                    const sotto_call* call, sotto_op** out_op);

/* out[i] = reduction of in[i] over ranks, in rank order, bit-identical on all ranks. 16-bit floats
 * are added, or multiplied, in fp32 and rounded once. SOTTO_NCCL_NATIVE=all gives this order up,
 * SOTTO_HIERARCHY adds inside of hosts first. With call->codec: the error-compensated mean.
 *   comm   [in]
 *   in     [in]  n buffers
 *   out    [in]  n buffers of the same dtypes and counts, written; out[i].data may be in[i].data
 *   n      [in]
 *   call   [in]  may be NULL; reduce: SOTTO_REDUCE_..., each with every dtype, but BIT_OR with
 *                integers only; codec: made for these dtypes and counts
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors; with a codec BUSY (it is in use by an operation) and, from the operation, NONFINITE.
 * Since: 0.1 */
SOTTO_API sotto_status sotto_all_reduce(sotto_comm* comm, const sotto_buffer* in,
                                        const sotto_buffer* out, uint64_t n, const sotto_call* call,
                                        sotto_op** out_op);

/* out[i] on the root = concatenation of in[i] over ranks.
 *   comm   [in]
 *   in     [in]  n buffers, with the same dtypes and counts on all ranks. In place: on the root
 *                in[i].data is the root's part of out[i]
 *   out    [in]  n buffers, written on the root alone: out[i].count = size * in[i].count. Not read
 *                elsewhere: may be NULL there
 *   n      [in]
 *   root   [in]  rank, 0 .. size-1
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_gather(sotto_comm* comm, const sotto_buffer* in,
                                    const sotto_buffer* out, uint64_t n, int32_t root,
                                    const sotto_call* call, sotto_op** out_op);

/* out[i] = this rank's part of in[i] on the root.
 *   comm   [in]
 *   in     [in]  n buffers, read on the root alone: in[i].count = size * out[i].count. May be NULL
 *                elsewhere
 *   out    [in]  n buffers, written, with the same dtypes and counts on all ranks. In place: on the
 *                root out[i].data is the root's part of in[i]
 *   n      [in]
 *   root   [in]  rank, 0 .. size-1
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_scatter(sotto_comm* comm, const sotto_buffer* in,
                                     const sotto_buffer* out, uint64_t n, int32_t root,
                                     const sotto_call* call, sotto_op** out_op);

/* Every rank sends a part of in[i] to every rank: part r of in[i] goes to rank r, part r of out[i]
 * comes from rank r, a rank's own part is copied. Without `parts` all parts are equal: part r is
 * the r-th of `size` equal pieces. With `parts` they are what the caller states, and what a rank
 * sends to another has to be what that one expects from it. Two ranks compare this before anything
 * else moves between them (one small message each way). Where they differ the operation ends with
 * PROTOCOL; the text names both ranks and both numbers. On a rank that had completed by then, the
 * next call ends with it.
 *   comm   [in]
 *   in     [in]  n buffers. In place: in[i].data is out[i].data, and with `parts` counts and
 *                offsets are the same on both sides. What is sent is then copied first, to scratch
 *                memory
 *   out    [in]  n buffers of the same dtypes, written. Without `parts`: of the same counts, which
 *                are multiples of size. What lies between parts is not touched
 *   n      [in]
 *   parts  [in]  n structs, or NULL: equal parts; NULL on all ranks or on none. The parts of an
 *                out[i] do not overlap
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors; INVALID_ARGUMENT also for parts that leave their buffer, overlap in `out`, or are not the
 * same on both sides for this rank itself. Since: 0.1 */
SOTTO_API sotto_status sotto_all_to_all(sotto_comm* comm, const sotto_buffer* in,
                                        const sotto_buffer* out, uint64_t n,
                                        const sotto_parts* parts, const sotto_call* call,
                                        sotto_op** out_op);

/* Sends n buffers to a rank. Matched with sotto_recv in call order per (source, destination); tags
 * are compared.
 *   comm   [in]
 *   in     [in]  n buffers
 *   n      [in]
 *   peer   [in]  rank, not the caller's own
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_send(sotto_comm* comm, const sotto_buffer* in, uint64_t n,
                                  int32_t peer, const sotto_call* call, sotto_op** out_op);

/* Receives n buffers from a rank. With no elements to move, send and receive do not wait for each
 * other.
 *   comm   [in]
 *   out    [in]  n buffers, written; dtypes and counts must equal the sender's
 *   n      [in]
 *   peer   [in]  rank, not the caller's own
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: writes after work queued on call->stream. Errors: the common
 * errors. Since: 0.1 */
SOTTO_API sotto_status sotto_recv(sotto_comm* comm, const sotto_buffer* out, uint64_t n,
                                  int32_t peer, const sotto_call* call, sotto_op** out_op);

/* From here to sotto_group_end, calls on this comm are collected and progress together as one
 * operation; their out_op must be NULL and they return at once. Needed where sends and receives of
 * one rank depend on each other. In the `call` of a collected call only tag and reduce may be set.
 * A group has at most 65535 calls.
 *   comm [in]
 * Threads: one per handle, not from callbacks. Blocks: no. Errors: INVALID_STATE (inside a group
 * already, fork, callback). Since: 0.1 */
SOTTO_API sotto_status sotto_group_begin(sotto_comm* comm);

/* Starts what was collected as one operation. After an error of a collected call nothing is started
 * and that error is returned here. The group is closed in any case.
 *   comm   [in]
 *   call   [in]  may be NULL; tag, reduce and codec must be zero: the collected calls have theirs
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: the common
 * errors; INVALID_STATE (no group). Since: 0.1 */
SOTTO_API sotto_status sotto_group_end(sotto_comm* comm, const sotto_call* call, sotto_op** out_op);

/* ---- codec ---------------------------------------------------------------------------------- */

/* Creates a codec with the residual state of n tensors, for sotto_all_reduce. The same codec, made
 * for the same counts, on all ranks; a difference is PROTOCOL on every rank at the first call.
 *
 * json: {"type": ..., ...}; all keys but type may be absent, a key that the type does not have is
 * an error.
 *  - type: "onebit" (or "1bit"), "bf16", "fp16", "int8", "int4", "topk"
 *  - chunk_align: 512; elements, a multiple of 8: what the part of a rank is padded to. int8 and
 *    int4: a multiple of block too
 *  - scale (onebit): "l2" (default) or "l1"
 *  - granularity (onebit): what has a scale of its own: "flat" (default: everything), "tensor",
 *    "bucket"
 *  - bucket_elements (onebit): 4194304; 8192 to 2^40, only with "bucket". A bucket travels while
 *    the next is encoded
 *  - mode (onebit): "strict" (default), or "compat", the arithmetic as published, for comparison:
 *    chunk_align is lcm(W, 8), and padding has error feedback and counts in the scales; not with
 *    "bucket"
 *  - block (int8, int4): elements per scale: 32, 64, 128, 256 or 512; 256 for int8, 128 for int4
 *  - residual (bf16, fp16, int8, int4): whether what one call loses is added to the next (4 bytes
 *    per element, and 8 / W of a server); true for int8 and int4, false for the casts; onebit
 *    always has it
 *  - hierarchy: "flat" (default), "sharded", "leader" or "auto" (sharded where several hosts have
 *    equally many ranks, more than one; else flat). In two levels ranks of a host average in full
 *    precision, and the codec works between hosts: sharded, each rank of a host for its part of the
 *    elements, with error feedback of that part alone; leader, the first rank of a host for all of
 *    them. With L ranks on each of M hosts, a host sends (M - 1) / M of two encodings of all
 *    elements to other hosts. One host: the plain mean. INVALID_ARGUMENT where hosts have different
 *    numbers of ranks. Not in mode "compat"
 *  - of topk, which has none of the keys above (chunk_align too):
 *    block: 4096; a power of two, 8 to 4096: elements of a tensor, the last block may be shorter;
 *    k: 64; 1 to block: elements that are sent of a block, those with the largest magnitudes, of
 *    shorter blocks in proportion (to the nearest, halves up), at least one;
 *    bits: 2, 4, 8 or 32 of a value. 2: a sign and one of two magnitudes of the block;
 *    index: "ef" (default: Elias-Fano, or a bit per element where that is shorter), or "packed"
 *    (log2 block bits for each index);
 *    error_decay: 1; 0 to 1: what is not sent is multiplied with it when it is added to the next
 *    call (4 bytes per element, always there);
 *    average: "ranks" (default: sums are divided by W), or "contributors" (by the number of ranks
 *    that have sent the element);
 *    dense_below: 0; tensors with fewer elements are sent as float32;
 *    median_clip: false; true: ranks whose payload of a tensor has a larger norm than that of the
 *    median rank count as if it had that norm (not where float32 is sent; error feedback stays);
 *    exchange: "gather" (default: every rank sends its selections to all others, which add them up)
 *    or "two_phase" (of every block to its server, which sends a selection of the mean to all, with
 *    error feedback of its own, 8 bytes per element that it serves; not with median_clip);
 *    k_server: 0; elements that a server sends of a whole block, min(2 k, block) to block; 0: min(W
 *    k, block), or block where that is not longer; of exchange two_phase;
 *    alone "identity", shape "flat" and levels "block" have no other values yet
 *
 * In one level every rank sends 2 (W - 1) P bytes of payload per call, P = the payload of ceil(n /
 * (align W)) align elements (onebit: per tensor or bucket): 1/8 byte per element, 2, (block + 4) /
 * block or (block / 2 + 4) / block. An element is encoded twice: by its sender, and as mean by its
 * server.
 * One encoding of c is off by at most
 *   bf16  2^-8 |c|, at least 2^-134     fp16  2^-11 |c|, at least 2^-25
 *   int8  a / 254 (1 + 2^-12)           int4  a / 14 (1 + 2^-12)
 * where a is the largest |c| of the block; a block with a < 2^-120 becomes 0. So without residual a
 * result is off by at most twice the largest such error of its ranks and its server, and rounding.
 * topk instead sends (W - 1) P bytes, P the sum over blocks of m elements with k sent ones of I +
 * ceil(k bits / 8) + 4 (32 bits: 0): I = 0 where k is m, "packed" I = ceil(k ceil(log2 m) / 8),
 * "ef" with l = floor(log2(m / k)) I = min(ceil(k l / 8) + ceil((k + floor((m - 1) / 2^l)) / 8),
 * ceil(m / 8)); 84 bytes for 4096 elements with k 64 and 2 bits. With exchange two_phase it sends P
 * of the blocks of others once and of its own, with k_server, W - 1 times: fewer bytes from W = 5
 * on with k 64 and 2 bits. Rank r serves blocks floor(r B / W) to floor((r + 1) B / W) - 1 of the B
 * blocks of all tensors, group by group and in their order. Elements that are not sent wait in the
 * residual, so there is no bound per element. Sums of finite values that overflow are Inf on all
 * ranks; with exchange two_phase they are NONFINITE.
 * With residual the sum of the results of T calls is off the sum of the means by the errors of the
 * last call only. onebit has no bound per element: see the residual. Where nothing is encoded (one
 * rank, one host with levels) values pass; else NaN, Inf, and what the type has no number for, fp16
 * from 65520 on, give NONFINITE on every rank: nothing is written, residuals are as before (the
 * worker's to one rounding). Where finite sums overflow, server residuals start at 0 again.
 *   comm      [in]  stays alive until the codec is destroyed
 *   json      [in]  as above
 *   like      [in]  n buffers: dtype (SOTTO_FLOAT32) and count of the tensors; data is not read
 *   n         [in]  > 0
 *   out_codec [out] owned by the caller: sotto_codec_destroy
 * Threads: one per comm, not from callbacks. Blocks: no. Errors: INVALID_ARGUMENT (names the key or
 * the tensor), UNSUPPORTED (dtype), INVALID_STATE (fork, callback). Since: 0.1 */
SOTTO_API sotto_status sotto_codec_create(sotto_comm* comm, const char* json,
                                          const sotto_buffer* like, uint64_t n,
                                          sotto_codec** out_codec);

/* Destroys the caller's reference; an operation in flight keeps the state alive.
 *   codec [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: no. Errors: INVALID_STATE (fork, callback).
 * Since: 0.1 */
SOTTO_API sotto_status sotto_codec_destroy(sotto_codec* codec);

/* What an export holds. exact: everything, continues bit for bit on the same number of ranks.
 * reset: error feedback is left out and starts at zero again. mean: error feedback averaged over
 * the ranks, 8 bytes per element; restores on any number of ranks (a codec's: in any codec that
 * keeps residuals of the tensors that have one) and loses nothing of the sum of the results.
 * configured (optimizers): what "sotto": {"checkpoint"} says, mean unless set. common (optimizers,
 * outer ones too): exported by one rank alone, as exact; imported by all ranks, of any number, from
 * the same export, exact or common: error feedback starts at zero, and what that rank of 0/1 Adam
 * had added up since a synchronisation becomes everybody's. */
typedef int32_t sotto_state_mode;
#define SOTTO_STATE_CONFIGURED 0
#define SOTTO_STATE_EXACT 1
#define SOTTO_STATE_RESET 2
#define SOTTO_STATE_MEAN 3
#define SOTTO_STATE_COMMON 4

/* Exports this rank's residuals; in mode mean those of all ranks, equal on all of them.
 *   codec   [in]
 *   mode    [in]  SOTTO_STATE_EXACT, SOTTO_STATE_RESET or SOTTO_STATE_MEAN
 *   buf     [out] cap bytes; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed
 * Threads: one per handle; mean: not from callbacks. Blocks: mean with a large enough buf is a
 * collective, at most the comm's timeout; else no. Errors: INVALID_ARGUMENT (mode), BUSY (in use by
 * an operation), INVALID_STATE (fork), mean: the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_codec_state_export(const sotto_codec* codec, sotto_state_mode mode,
                                                void* buf, uint64_t cap, uint64_t* out_len);

/* Replaces this rank's residuals. Nothing changes on error.
 *   codec [in]
 *   mode  [in] SOTTO_STATE_EXACT or SOTTO_STATE_MEAN, as exported, or SOTTO_STATE_RESET
 *   buf   [in] what an export wrote; may be NULL if len is 0
 *   len   [in] bytes of buf
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (truncated, damaged, of other
 * tensors, of another mode; exact: of another codec, world size or rank), BUSY (in use by an
 * operation), UNSUPPORTED (newer format), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_codec_state_import(sotto_codec* codec, sotto_state_mode mode,
                                                const void* buf, uint64_t len);

/* ---- plan and configuration ----------------------------------------------------------------- */

/* What an operation will send, before anything is sent, as JSON: payload, header and message counts
 * per peer and in total for this rank, steps, scratch bytes.
 *   comm    [in]
 *   request [in]  {"kind": "all_reduce", "dtype": "fp32", "counts": [n, ...], "reduce": "sum",
 *                 "root": 0, "peer": 0, "in_place": false, "codec": {...} or absent}; all keys but
 *                 kind may be absent where they have no meaning. "counts" are those of `in` (of a
 *                 scatter: the root's). An all_to_all with parts has "in_counts" and "out_counts"
 *                 instead: for every buffer a list with a number for every rank. all_gather_v has
 *                 "out_counts" like that, reduce_scatter_v "in_counts"
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (names the key), UNSUPPORTED,
 * INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_plan_report(const sotto_comm* comm, const char* request, char* buf,
                                         uint64_t cap, uint64_t* out_len);

/* What a DeepSpeed configuration file will do here, key by key, as JSON; or its error.
 *   json       [in]  the text of the file, or the same as one base64url word, as DeepSpeed takes
 *                    it on a command line; files are read by the caller
 *   world_size [in]  data-parallel ranks, for the batch arithmetic; 0: unknown
 *   n_params   [in]  parameters, for memory and bytes per step; 0: unknown
 *   buf        [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap        [in]  bytes of buf
 *   out_len    [out] bytes needed, without the final zero
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (names the key and a remedy). Since: 0.1 */
SOTTO_API sotto_status sotto_config_report(const char* json, int32_t world_size, uint64_t n_params,
                                           char* buf, uint64_t cap, uint64_t* out_len);

/* A configuration as plain JSON on one line, without comments, and with values in place of the
 * texts "auto" that files for training frameworks leave to the program.
 *   json    [in]  as for sotto_config_report
 *   values  [in]  NULL, or a JSON object from paths to values, {"train_batch_size": 64,
 *                 "optimizer.params.lr": 0.001, "sotto.param_groups[0].lr": 0.01}: numbers, lists,
 *                 true, false, null or texts. Paths where the file has something else than "auto",
 *                 or nothing, are not used. An "auto" without a value stays; where it matters
 *                 sotto_config_report and sotto_optim_create refuse it and name the key
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: any. Blocks: no. Errors: INVALID_ARGUMENT (no JSON: line and column; a key that is there
 * twice; values). Keys and ranges are not checked. Since: 0.1 */
SOTTO_API sotto_status sotto_config_resolve(const char* json, const char* values, char* buf,
                                            uint64_t cap, uint64_t* out_len);

/* ---- optimizer ------------------------------------------------------------------------------ */

/* Creates an optimizer over n parameters, the same on all ranks in names, counts and order (checked
 * by hash). Collective: if one rank refuses, whatever the reason, all of them end with its code and
 * text, and the comm stays as it is. A rank does not take part whose comm is no handle or which
 * calls from inside a callback.
 * Parameter values: "sotto": {"initial_parameters": "check"} (the default) compares a hash of them
 * and names the first parameter that differs; "broadcast" gives all ranks those of rank 0, and
 * writes model copies; "trust" does not look. Later, every step compares learning rates, weight
 * decays and betas, and the first one after an import, unless "trust", a hash of what was imported:
 * ranks that differ end with PROTOCOL.
 *   comm      [in]  stays alive until the optimizer is destroyed
 *   json      [in]  the text of a whole DeepSpeed file, or just {"optimizer": {...}}; either may
 *                   come as one base64url word. "scheduler" and "gradient_clipping" act inside
 *                   sotto_optim_step. Batch keys are checked when
 *                   present. All params use optimizer.params; "sotto": {"param_groups": [{...},
 *                   ...]} overrides hyper-parameters for group 0, 1, ... SGD, Adam, AdamW, Lamb
 *                   and Lion average gradients in full precision, or with the codec that
 *                   "sotto": {"gradient_codec": {...}} describes as sotto_codec_create does (not
 *                   in mode "compat"); its error feedback is a part of the state.
 *                   "sotto": {"hierarchy": ...}, with the values of sotto_codec_create, has all
 *                   averages in two levels, also those of "outer": full precision inside hosts,
 *                   and between them what the type or the codec sends. Not with topk or mode
 *                   "compat"
 *                   "sotto": {"state_dtype": "bf16" or "fp8"} keeps momentum and variance of SGD,
 *                   Adam, AdamW and Lion in 2 or 1 bytes per element instead of 4 ("fp8": 8-bit
 *                   floats, 256 elements of a tensor share an exponent). An update is computed in
 *                   float32 and rounded stochastically, by bits that follow from step and element,
 *                   so that all ranks and devices have the same. Exported state is float32 in any
 *                   case, and may be imported with another state_dtype
 *   params    [in]  n structs; their buffers are borrowed until the optimizer is destroyed.
 *                   Names are UTF-8 and do not begin like "group:<i>". group is below the length of
 *                   "param_groups"; without that key, below n
 *   n         [in]  > 0
 *   out_optim [out] owned by the caller: sotto_optim_destroy
 * Threads: one per comm, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (names the key or the parameter), UNSUPPORTED (names what is not built),
 * PROTOCOL (ranks differ), INVALID_STATE (fork, callback), the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_create(sotto_comm* comm, const char* json,
                                          const sotto_param* params, uint64_t n,
                                          sotto_optim** out_optim);

/* One optimizer step with the gradients now in the parameters' grad buffers: averages them (full
 * precision, sotto.gradient_codec, or the compressed momentum), clips, updates the parameters,
 * advances step and learning-rate schedule. Collective. If the operation ends with an error nothing
 * was updated; error feedback is what it was but for one rounding.
 * With fp16.enabled gradients are divided by the loss scale. With a dynamic scale a step whose
 * gradients overflow on any rank updates nothing on any, halves the scale and is no error
 * (skipped_steps counts it), until sotto.max_consecutive_skips of them in a row are: NONFINITE.
 * 0/1 Adam, steps that send nothing (no clipping, no loss scaling): a rank that meets NaN or Inf
 * ends with NONFINITE alone, takes no part in this step and stays in step with the others.
 * With "sotto": {"outer": ...} the step is local, and outer steps follow it (sotto_outer_step): a
 * collective where something happens. A rank's NaN, Inf or overflow is its own: it ends with
 * NONFINITE alone, or is counted, and takes part in the rest. If the group fails the outer step has
 * not happened, and the local one has or has not.
 * While call->stream is being captured into a CUDA graph the step is recorded and does not happen:
 * see sotto_optim_replay; INVALID_STATE with outer steps.
 *   optim  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL: the call waits for completion
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: BUSY (previous
 * step in flight) and the common errors of collectives; from the operation also NONFINITE (nothing
 * updated, group healthy). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_step(sotto_optim* optim, const sotto_call* call,
                                        sotto_op** out_op);

/* Replays a step that is part of a CUDA graph: it happens with the next launch of the graph, which
 * the caller makes after this call, once.
 * sotto_optim_step on a stream that is being captured records the step and changes nothing; its
 * operation is complete at once. Then, for every step: sotto_optim_replay; cudaGraphLaunch;
 * sotto_op_wait, which returns what a step returns. Learning rates, bias corrections, loss scale
 * and step number are those of the replayed step, read by the graph from the host's memory, so
 * schedules, skipped steps and all other calls work as usual.
 * Steps of one rank or over NCCL can be recorded. To the other ranks a replay is the step that it
 * stands for, which they may replay or call. NCCL's own collectives (SOTTO_NCCL_NATIVE=all) connect
 * at their first call, so ranks call that, or record it, together.
 * A recording is for steps like the recorded one, and INVALID_STATE tells that the next is not: the
 * 1-bit types need one before and one after the switch, and wherever error feedback is kept (the
 * compressed stage, a gradient codec) it changes between two places with a recording each. The
 * first step of a compressed stage cannot be recorded. sotto_optim_step is always possible.
 * A launch without a replay writes no parameter; it is found by the next replay, which fails the
 * comm. The graph must not be launched any more when the operation is released, the optimizer or
 * the comm is destroyed, or the comm has failed. sotto_call.timeout_us counts from the replay on.
 *   optim [in]
 *   op    [in] the operation of a recorded step of this optimizer; sotto_op_stream_wait refuses it
 * Threads: one per handle, not from callbacks. Blocks: over NCCL until the messages of what
 * was called before on the comm and its splits are through; those of what is called after wait for
 * the launch's end. Stream: none. Errors: BUSY (a step is in flight; others are, for longer than
 * the timeout), INVALID_ARGUMENT (released; no step of this optimizer), INVALID_STATE
 * (not recorded; the next step is not like the recorded one; launched otherwise; fork, callback),
 * the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_replay(sotto_optim* optim, sotto_op* op);

/* Gradient accumulation: adds the gradients now in the grad buffers, those of one micro-batch, to
 * sums in float32 that the library keeps (4 bytes per element). The next sotto_optim_step takes the
 * mean of these and of the gradients it finds itself: of k + 1 micro-batches after k calls, in
 * every stage. Local: nothing is sent, but all ranks have to make the same number of calls. The
 * sums start anew after the step, whatever became of it; until then the loss scale cannot be set,
 * and exports do not have them. A trainer that averages micro-batches in its own buffers needs no
 * call.
 *   optim  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] as for sotto_optim_step; the buffers are free again when it has completed
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads after work queued on call->stream. Errors: BUSY (step in
 * flight), INVALID_STATE (more than gradient_accumulation_steps, if the configuration has batch
 * keys; sotto_optim_step gives it for less), the common errors of collectives. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_accumulate(sotto_optim* optim, const sotto_call* call,
                                              sotto_op** out_op);

/* Sets a number that changes during training, on all ranks alike.
 *   optim [in]
 *   name  [in] "lr" (overrides the schedule until it is set to NaN), "weight_decay"; "beta1" and
 *              "beta2" (NaN: the schedule's or the configuration's again; all types but SGD), "eps"
 *              (all but SGD; where the variance is frozen it was frozen with it and cannot change),
 *              "momentum" (SGD that was created with one), "max_coeff" and "min_coeff" (LAMB
 *              types); with fp16.enabled "loss_scale" (a dynamic scale goes on from it); with a
 *              scheduler "scheduler_iteration", the updates that it counts as done less one.
 *              Bias corrections are those of the betas in force
 *   group [in] group index, or -1: all groups; loss_scale, scheduler_iteration: -1
 *   value [in] >= 0 and finite; betas: < 1; momentum: > 0; loss_scale: 1e-37 to 1e38;
 *              min_coeff <= max_coeff; scheduler_iteration: whole, -1 is the start
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (unknown name, group or value),
 * BUSY (step in flight), INVALID_STATE (eps; loss_scale with micro-batches; fork). Nothing changes
 * on error. Since: 0.1, names but "lr", "weight_decay", "loss_scale": 0.2 */
SOTTO_API sotto_status sotto_optim_set(sotto_optim* optim, const char* name, int32_t group,
                                       double value);

/* Says where gradients lie from now on: for programs that have them in other memory at every step,
 * as frameworks do that allocate them anew. Nothing is copied; what lay in the buffers before is
 * not read any more. Micro-batches that were accumulated stay.
 *   optim [in]
 *   grads [in] n buffers, borrowed like those of sotto_param, in the order of params: of the same
 *              dtype and count as registered; they must not overlap parameters or model copies
 *   n     [in] number of parameters
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (n, dtype, count, alignment,
 * another device or an overlap: names the parameter), UNSUPPORTED (unknown dtype or kind of
 * device), BUSY (step in flight), INVALID_STATE (fork). Nothing changes on error. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_set_grads(sotto_optim* optim, const sotto_buffer* grads,
                                             uint64_t n);

/* Hot figures of an optimizer. struct_size in, the rest out. */
typedef struct sotto_optim_info {
  uint32_t struct_size;
  int32_t stage;       /* 0: full-precision (warm-up), 1: compressed */
  uint64_t step;       /* updates done */
  uint64_t state_step; /* step number of checkpoints and schedules: step + step_offset (1-bit) */
  double lr;           /* of group 0 for the next step */
  double grad_norm; /* last step, before clipping; compressed: mean over ranks; NaN: not computed */
  uint64_t payload_bytes_next_step; /* what this rank will send in the next step */
  uint64_t header_bytes_next_step;
  uint64_t state_bytes;   /* memory held */
  uint64_t skipped_steps; /* steps that updated nothing: NONFINITE, or left out by loss scaling;
                             part of the state */
  double loss_scale;      /* gradients of the next step have to be multiplied with it; 1: none */
  uint64_t micro_batches; /* accumulated for the next step */
} sotto_optim_info;
#define SOTTO_OPTIM_INFO_INIT \
  { sizeof(sotto_optim_info), 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0, 0 }

/* Reads the hot figures.
 *   optim    [in]
 *   out_info [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (struct_size), BUSY (step in
 * flight), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_get_info(const sotto_optim* optim, sotto_optim_info* out_info);

/* Report as JSON.
 *   optim   [in]
 *   kind    [in]  NULL or "all"; "config", "groups", "tensors" (trust ratios, factors, scaling
 *                 coefficients)
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind), BUSY (step in
 * flight), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_report(const sotto_optim* optim, const char* kind, char* buf,
                                          uint64_t cap, uint64_t* out_len);

/* Exports this rank's state, parameters included, and changes nothing. In modes mean and reset 0/1
 * Adam's parameters and momentum are those of a synchronisation in full precision, the same on all
 * ranks. Micro-batches accumulated for the next step are no part of it, and an import drops them.
 * Nor is what sotto_optim_set has set, but for loss_scale and scheduler_iteration.
 *   optim   [in]
 *   mode    [in]  SOTTO_STATE_...
 *   buf     [out] cap bytes; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed
 * Threads: one per handle; mean and reset: not from callbacks. Blocks: with a large enough buf mean
 * is a collective (of the 1-bit types), and so is reset of 0/1 Adam, at most the comm's timeout;
 * else no. Errors: INVALID_ARGUMENT (mode), BUSY (step in flight), INVALID_STATE (fork), of
 * collectives: the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_state_export(const sotto_optim* optim, sotto_state_mode mode,
                                                void* buf, uint64_t cap, uint64_t* out_len);

/* Replaces this rank's state, parameters and model copies included; nothing changes on error. Stage
 * and counters come from the blob, unless freeze_step of this configuration says otherwise.
 *   optim [in]
 *   mode  [in] as exported; RESET takes any export but one of 0/1 Adam between synchronisations
 *   buf   [in] what an export wrote; may be NULL if len is 0
 *   len   [in] bytes of buf
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (truncated, damaged, other tensors,
 * other algorithm, for EXACT: other world size, rank, chunk_align or granularity), BUSY (step in
 * flight), UNSUPPORTED (newer format), INVALID_STATE (fork). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_state_import(sotto_optim* optim, sotto_state_mode mode,
                                                const void* buf, uint64_t len);

/* Replaces the state by what a DeepSpeed checkpoint holds, array by array. Collective: every rank
 * gives the same arrays; error feedback starts at zero. Nothing changes on error, on any rank.
 *
 * A name is "<parameter>/<key>", or "group:<i>/<key>" for all parameters of group i: their elements
 * one after the other in order of registration, as DeepSpeed's fp16 wrapper flattens a group, or
 * one number that all of them have. Keys are those of the checkpoint's "state":
 *   all types   exp_avg, exp_avg_sq; step; fp32: the parameters themselves (fp32_groups_flat,
 *               fp32_groups, or a float32 model), for all parameters or for none: then they stay as
 *               they are and have to be the checkpoint's
 *   OneBitLamb  of one parameter each: lamb_coeff_freeze, last_factor, scaling_coeff;
 *               exp_avg_sq_fresh
 *   ZeroOneAdam var_interval, var_counter, local_step_interval, local_step_counter; lrs and
 *               momentum_accumulator, both or none: none makes what rank 0 had added since its last
 *               synchronisation everybody's, as a synchronisation does
 * and of the run:
 *   scheduler/last_batch_iteration   with a scheduler; -1: the schedule starts again
 *   loss_scaler/cur_scale, loss_scaler/cur_iter, loss_scaler/last_overflow_iter   with a dynamic
 *               loss scale
 * Elements are fp32, fp16, bf16 or fp64, as many as the parameter has, finite, rounded to fp32;
 * numbers are int64, int32, fp64 or fp32. worker_error and server_error are refused: a checkpoint
 * has only those of rank 0; so are tensor_size, corrected_tensor_size and server_chunk_size.
 *
 * The stage follows from step and from freeze_step or var_freeze_step of this configuration. 1-bit
 * LAMB before freeze_step starts its coefficients again and needs none of them; at or behind it it
 * needs lamb_coeff_freeze, and if there is a scaling_coeff, last_factor and exp_avg_sq_fresh too;
 * without, the compressed stage begins with the next step. What the stage or the configuration has
 * no use for may be absent; of what is there nevertheless only name, type and count are checked.
 * Parameters without elements need nothing.
 *   optim  [in]
 *   arrays [in] n structs, in any order, in host memory or on the optimizer's device; read during
 *               the call only
 *   n      [in] > 0
 * Threads: one per handle, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (names the array; of unknown names the nearest; of absent ones the first few;
 * another device), UNSUPPORTED (dtype, unknown kind of device, SGD, newer field), BUSY (step in
 * flight), PROTOCOL (another rank refuses its arrays, or has others), INVALID_STATE (fork,
 * callback, open group), the comm's own. Since: 0.1 */
SOTTO_API sotto_status sotto_optim_state_import_arrays(sotto_optim* optim,
                                                       const sotto_named_array* arrays, uint64_t n);

/* 0/1 Adam between synchronisations: averages what the ranks have summed up since the last one, in
 * 1 bit with error feedback as a step does, so that all have the same parameters and momentum: for
 * an evaluation or a save in between. Where there is nothing to average, and for other optimizers,
 * the operation does nothing. Not needed before an export. Collective.
 *   optim  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] as for sotto_optim_step
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: writes after work queued on call->stream. Errors: BUSY (step in
 * flight), INVALID_STATE (micro-batches accumulated), the common errors of collectives. Since: 0.2
 */
SOTTO_API sotto_status sotto_optim_synchronize(sotto_optim* optim, const sotto_call* call,
                                               sotto_op** out_op);

/* Takes the next bytes of a state. 0: go on; anything else ends the export. */
typedef int32_t (*sotto_write_fn)(void* user, const void* data, uint64_t bytes);
/* Puts the bytes at an offset of a state into data, all of them. 0: done; anything else ends the
 * import. */
typedef int32_t (*sotto_read_fn)(void* user, uint64_t offset, void* data, uint64_t bytes);

/* Exports the same bytes as sotto_optim_state_export, in order and in parts of at most 1 MiB, for
 * states that should not lie in memory as a whole. The library holds a few MiB whatever the
 * state's size, and of the 1-bit types a bit per element. After an error what was written is no
 * state.
 *   optim [in]
 *   mode  [in] SOTTO_STATE_...
 *   write [in] not NULL; may not call the library, but for sotto_op_error and sotto_op_test
 *   user  [in] passed to write
 * Threads: one per handle; mean and reset: not from callbacks. Blocks: as sotto_optim_state_export
 * with a large enough buf. Errors: as there, CANCELLED (write has not returned 0; a collective goes
 * on to its end for the other ranks). Since: 0.2 */
SOTTO_API sotto_status sotto_optim_state_write(const sotto_optim* optim, sotto_state_mode mode,
                                               sotto_write_fn write, void* user);

/* Imports as sotto_optim_state_import does, in parts of at most 1 MiB. Everything is read and
 * checked before anything changes, so bytes are asked for more than once, at any offset. If read
 * fails then nevertheless or gives other bytes than before, the state is torn: steps and exports
 * are INVALID_STATE until another import succeeds.
 *   optim [in]
 *   mode  [in] as exported; RESET takes any export but one of 0/1 Adam between synchronisations
 *   read  [in] not NULL; may not call the library, but for sotto_op_error and sotto_op_test
 *   user  [in] passed to read
 *   len   [in] bytes of the state
 * Threads: one per handle. Blocks: no. Errors: as sotto_optim_state_import, CANCELLED (read has not
 * returned 0). Since: 0.2 */
SOTTO_API sotto_status sotto_optim_state_read(sotto_optim* optim, sotto_state_mode mode,
                                              sotto_read_fn read, void* user, uint64_t len);

/* Bytes of the trainer's own that belong to the state, a data loader's position for example:
 * exports hold them under the state's checksum, and an import replaces them (import_arrays: by
 * nothing). The library does not look at them, and ranks may have different ones.
 *   optim [in]
 *   data  [in] copied; may be NULL if len is 0
 *   len   [in] bytes, at most 67108864
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (len, data), BUSY (step in flight),
 * INVALID_STATE (fork). Since: 0.2 */
SOTTO_API sotto_status sotto_optim_set_user_state(sotto_optim* optim, const void* data,
                                                  uint64_t len);

/* What sotto_optim_set_user_state or the last import has set.
 *   optim   [in]
 *   buf     [out] cap bytes; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (out_len), INVALID_STATE (fork).
 * Since: 0.2 */
SOTTO_API sotto_status sotto_optim_get_user_state(const sotto_optim* optim, void* buf, uint64_t cap,
                                                  uint64_t* out_len);

/* Says where parameters and model copies lie from now on, as sotto_optim_set_grads does for
 * gradients. Nothing is copied: the parameters are the values in the new place, equal on all ranks.
 * 0/1 Adam with a frozen variance makes them anew from what it keeps: there they have to be those
 * of the old place. Gradients are not looked at; they must not overlap when a step begins.
 *   optim        [in]
 *   params       [in] n buffers, borrowed, in the order of registration: of the same count
 *   model_copies [in] NULL: they stay where they are; else n buffers of the registered dtype and
 *                     count, borrowed; all-zero where a parameter has no copy
 *   n            [in] number of parameters
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (n, dtype, count, alignment,
 * another device or an overlap: names the parameter), UNSUPPORTED (unknown dtype or kind of
 * device), BUSY (step in flight), INVALID_STATE (fork). Nothing changes on error. Since: 0.2 */
SOTTO_API sotto_status sotto_optim_set_params(sotto_optim* optim, const sotto_buffer* params,
                                              const sotto_buffer* model_copies, uint64_t n);

/* Says which parameters the next steps leave as they are, momentum, variance and model copy
 * included; weight decay does not act. Their gradients are still averaged, count in the norm and
 * should be zero. Until the next call, also through imports; behind one, flags that the state had
 * change nothing. Steps of ranks that froze others are PROTOCOL. Error feedback goes on. With the
 * 1-bit types a parameter that had no gradient before compression began has no variance and stands
 * still behind it (zero_variance_policy "mask"); where it is no longer frozen a warning names it.
 *   optim  [in]
 *   frozen [in] n flags, in the order of registration: 1: frozen
 *   n      [in] number of parameters
 * Threads: one per handle, not from callbacks. Blocks: 0/1 Adam between synchronisations is
 * synchronised if flags change, a collective, at most the comm's timeout; else no. Errors:
 * INVALID_ARGUMENT (n, other values than 0 and 1), BUSY (step in flight), INVALID_STATE
 * (micro-batches of 0/1 Adam are accumulated; fork, callback, open group), 0/1 Adam: the comm's
 * own. Nothing changes on error. Since: 0.2 */
SOTTO_API sotto_status sotto_optim_set_frozen(sotto_optim* optim, const uint8_t* frozen,
                                              uint64_t n);

/* Destroys the optimizer. The handle is gone whatever is returned, except for INVALID_STATE.
 *   optim [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: waits for a step in flight, and for averages
 * of outer steps under way, at most their deadline; withdraws from a round that is open. Errors:
 * INVALID_STATE (fork, callback). Since: 0.1 */
SOTTO_API sotto_status sotto_optim_destroy(sotto_optim* optim);

/* ---- outer optimizer ------------------------------------------------------------------------ */

/* Outer optimizers train with inner steps that send nothing: every rank makes its own, with any
 * optimizer. What a period of them has changed is averaged over ranks, in the background of the
 * next ones, and moves an anchor, from which all go on: CO2, SlowMo, DiLoCo, local SGD and their
 * family. sotto_outer_step is called after every inner step, whatever the settings. */

/* Creates an outer optimizer over n parameters, whose values are the first anchor. Collective:
 * names, counts, values (by a hash) and settings are compared; if one rank refuses, whatever the
 * reason, all of them end with its code and text, and the comm stays as it is.
 *   comm      [in]  outlives the outer optimizer, whose averages go on beside its collectives. Over
 *                   NCCL, which matches by order, all ranks call steps and collectives in one order
 *   json      [in]  the object {"preset": "co2", "period": 48, ...}, or a file that has it as
 *                   "sotto": {"outer": {...}}, whose "hierarchy" beside it has averages in two
 *                   levels; either may come as one base64url word. sotto_config_report explains
 *                   every key
 *   params    [in]  n structs: live values (float32) and model copies, which are written after
 *                   every change; group, grad and mask must be empty. Borrowed until the outer
 *                   optimizer is destroyed
 *   n         [in]  > 0
 *   out_outer [out] owned by the caller: sotto_outer_destroy
 * Threads: one per comm, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (names the key or the parameter), UNSUPPORTED (names what is not built),
 * PROTOCOL (ranks differ), INVALID_STATE (fork, callback), the comm's own. Since: 0.2 */
SOTTO_API sotto_status sotto_outer_create(sotto_comm* comm, const char* json,
                                          const sotto_param* params, uint64_t n,
                                          sotto_outer** out_outer);

/* The same for parameters that are shards. Norms that outer steps take (penalties gap_*, clips
 * "norm" and "rms") are of the whole parameters; codecs have scales and error feedback of the
 * shard, and payloads, memory and delta_norm are those of the shard. What is not finite in a shard
 * is left out there alone unless all ranks of the replica set "weight" 0. Collective among both.
 *   comm      [in]  of the ranks that hold the same shard, one of every replica
 *   shards    [in]  of the ranks with the shards of this replica, every element on one of them; of
 *                   the context of comm, whose failure is one of shards too. Outlives the outer
 *                   optimizer; updates use it, in the same order of calls on its ranks
 *   json      [in]  as sotto_outer_create, without granularity "tensor" of a gap_*, "freshness"
 *                   with norms, period "auto", a number of fragments, nonfinite "error"
 *   params    [in]  as sotto_outer_create; as many on all ranks, counts may differ by shard
 *   n         [in]  > 0
 *   out_outer [out] owned by the caller: sotto_outer_destroy
 * Threads: one per comm, not from callbacks. Blocks: yes, at most the comm's timeout. Errors: as
 * sotto_outer_create; UNSUPPORTED (a key that every shard would decide for itself),
 * INVALID_ARGUMENT (shards of another context), PROTOCOL (replicas or shards differ): the same on
 * all ranks of both comms. Since: 0.2 */
SOTTO_API sotto_status sotto_outer_create_sharded(sotto_comm* comm, sotto_comm* shards,
                                                  const char* json, const sotto_param* params,
                                                  uint64_t n, sotto_outer** out_outer);

/* The outer steps of an optimizer whose file has "sotto": {"outer": {...}}. Its steps are local,
 * and sotto_optim_step does what sotto_outer_step does, with the learning rate of group 0. The
 * handle is for flush, swap, vote, "loss", "weight" and figures: what the optimizer does itself
 * (steps, "lr", export, import) is INVALID_STATE here. Parameters stay borrowed until both are
 * destroyed.
 *   optim     [in]
 *   out_outer [out] owned by the caller: sotto_outer_destroy; each call gives one more
 * Threads: one per handle of both. Blocks: no. Errors: INVALID_STATE (the file has no sotto.outer;
 * fork). Since: 0.2 */
SOTTO_API sotto_status sotto_optim_outer(sotto_optim* optim, sotto_outer** out_outer);

/* Sets what belongs to the next steps.
 *   outer [in]
 *   name  [in] "lr": the inner learning rate, for settings in its units (lr_normalised, clip_units
 *              "grad"); before the first call that of an imported state, or 1. "loss": what this
 *              rank tells the others with its next averages (sotto_outer_info.loss). "weight": 1,
 *              or 0: this rank's inner steps do not count in the next averages. With a codec other
 *              than topk what it has kept of earlier ones still does. "retune", 1: all ranks
 *              measure a period "auto" anew when this rank's next average has been consumed; it
 *              stays until then
 *   value [in] finite
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (unknown name, value), BUSY (step
 * in flight), INVALID_STATE (retune of a period that is not "auto"; fork). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_set(sotto_outer* outer, const char* name, double value);

/* Says where parameters and model copies lie from now on. Nothing is copied: live parameters are
 * the values in the new place. While the anchor is in their place (sotto_outer_swap) those are the
 * anchor's.
 *   outer        [in]
 *   params       [in] n buffers, borrowed, in the order of registration: float32, of the same
 *                     count
 *   model_copies [in] NULL: they stay where they are; else n buffers of the registered dtype and
 *                     count, borrowed; all-zero where a parameter has no copy
 *   n            [in] number of parameters
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (n, dtype, count, alignment,
 * another device or an overlap: names the parameter), UNSUPPORTED (unknown dtype or kind of
 * device), BUSY (step in flight), INVALID_STATE (fork). Nothing changes on error. Since: 0.2 */
SOTTO_API sotto_status sotto_outer_set_params(sotto_outer* outer, const sotto_buffer* params,
                                              const sotto_buffer* model_copies, uint64_t n);

/* Counts an inner step, which has changed the live parameters. In most calls that is all. Every
 * period it takes what is to be averaged, and where an average is due it moves the anchor and
 * changes the live parameters; the average that is launched goes on behind the operation.
 * Collective where something happens: all ranks make the same number of calls. If the average is
 * late the operation waits for it. If its group has failed, live parameters, anchor and momentum
 * are those of before the call.
 * NCCL matches messages by their order, so there an average goes in slices of about 4 MiB, some
 * with the launch and the others with later calls, and what is called in between waits for one
 * slice, not for the average. All ranks make these and other collective calls in the same order.
 * A rank whose parameters are not finite is left out of the average ("nonfinite": "skip_rank"), or
 * ends the step with NONFINITE on all ranks, where nothing is updated ("error"). An average that
 * the codec cannot encode (a change beyond fp16) leaves out all ranks, with a warning.
 *   outer  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] owned by the caller: sotto_op_release; may be NULL: the call waits for completion.
 *                The caller may touch the parameters again when it has completed
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: reads and writes after work queued on call->stream. Errors: BUSY
 * (previous step in flight), INVALID_STATE (sotto_outer_swap; "lr" is 0 or less where lr_normalised
 * divides by it) and the common errors of collectives; from the operation also NONFINITE (nothing
 * updated, group healthy). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_step(sotto_outer* outer, const sotto_call* call,
                                        sotto_op** out_op);

/* Averages what was not averaged yet and consumes everything: live parameters become the anchor,
 * whatever the merge. For the end of a training. A second call does nothing; if the group failed,
 * it makes the rest, behind an import. lr_normalised takes the last rate above 0. Collective.
 *   outer  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] as for sotto_outer_step
 * Threads: one per handle, not from callbacks. Blocks: as sotto_outer_step. Stream: as
 * sotto_outer_step. Errors: as sotto_outer_step. Since: 0.2 */
SOTTO_API sotto_status sotto_outer_flush(sotto_outer* outer, const sotto_call* call,
                                         sotto_op** out_op);

/* Puts the anchor into the place of the live parameters, for an evaluation; the next call puts them
 * back, bit for bit. Averages go on meanwhile; steps and flushes are INVALID_STATE. Local.
 *   outer  [in]
 *   call   [in]  may be NULL; reduce and codec must be zero
 *   out_op [out] as for sotto_outer_step
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; without
 * out_op until completion. Stream: as sotto_outer_step. Errors: BUSY (step in flight),
 * OUT_OF_MEMORY (the first call allocates as much as the parameters have), the common errors of
 * collectives. Since: 0.2 */
SOTTO_API sotto_status sotto_outer_swap(sotto_outer* outer, const sotto_call* call,
                                        sotto_op** out_op);

/* Bits that travel with the next average: sotto_outer_info.votes has those of all ranks, or-ed,
 * when it has been consumed, at the same step on all of them.
 *   outer [in]
 *   bits  [in] or-ed to those of earlier calls
 * Threads: one per handle. Blocks: no. Errors: BUSY (step in flight), INVALID_STATE (fork). Since:
 * 0.2 */
SOTTO_API sotto_status sotto_outer_vote(sotto_outer* outer, uint32_t bits);

#define SOTTO_OUTER_LAUNCHED 1u
#define SOTTO_OUTER_CONSUMED 2u   /* live parameters have changed */
#define SOTTO_OUTER_HELD 4u       /* they are back at the anchor: there was no average yet */
#define SOTTO_OUTER_WAITED 8u     /* the average was late: exposed_ns */
#define SOTTO_OUTER_MEASURING 16u /* a period "auto" is not chosen yet: it is measured */

/* Hot figures of an outer optimizer. struct_size in, the rest out. Those of an update are of the
 * fragment that was updated last; 1, 0 or NaN before the first. */
typedef struct sotto_outer_info {
  uint32_t struct_size;
  uint32_t events;        /* of the last step: SOTTO_OUTER_..., or-ed */
  uint64_t step;          /* inner steps done */
  uint64_t round;         /* averages consumed, of all fragments */
  uint64_t next_boundary; /* inner steps until something happens */
  uint32_t fragments;
  uint32_t in_flight;   /* averages launched and not consumed */
  uint32_t votes;       /* of all ranks, with the last average */
  uint32_t not_finite;  /* ranks with NaN or Inf, which the last average has left out */
  double lambda;        /* staleness penalty: what a late average was divided by */
  double gap;           /* length of the anchor's update that the average had missed */
  double unit;          /* what the gap is compared with */
  double clip_fraction; /* share of elements whose momentum was limited */
  double delta_norm;    /* root of the mean over ranks of the squared change of a period */
  double step_norm;     /* length of the anchor's update */
  double gain;          /* of slow directions, for the settings: alpha / (1 - beta) and the like */
  double overlap_ratio; /* share of the time of averages that was hidden; 1: nothing was exposed */
  double contention;    /* how much longer an inner step takes beside an average; NaN: not known */
  int64_t network_ns;   /* of the last average consumed, between slices apart; -1: none */
  int64_t exposed_ns;   /* the part of it in which a step waited; -1: none */
  uint64_t payload_bytes_next_launch; /* what this rank will send, of the first fragment */
  uint64_t header_bytes_next_launch;
  uint64_t state_bytes; /* memory held */
  uint64_t period;      /* inner steps from one launch of a fragment to the next, now */
  uint64_t delay;       /* inner steps from a launch to its consumption, now */
  double loss;          /* mean of the "loss" that ranks had set at the last average; NaN: none */
} sotto_outer_info;
#define SOTTO_OUTER_INFO_INIT                                                                      \
  {                                                                                                \
    sizeof(sotto_outer_info), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, \
        0, 0, 0, 0, 0, 0, 0, 0.0                                                                   \
  }

/* Reads the hot figures.
 *   outer    [in]
 *   out_info [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (struct_size), BUSY (step in
 * flight), INVALID_STATE (fork). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_get_info(const sotto_outer* outer, sotto_outer_info* out_info);

/* Exports this rank's state: live parameters, anchor, momentum, error feedback, counters, and the
 * average under way, for which it waits but which it does not consume. After any inner step, also
 * of a comm that has failed: an average that was not delivered then is launched again by the first
 * step after the import. So is one that goes in slices (sotto_outer_step) while some have not gone:
 * it is not waited for, and in a state of one rank for all it is what that rank has sent.
 *   outer   [in]
 *   mode    [in]  SOTTO_STATE_EXACT, SOTTO_STATE_COMMON (alike here), SOTTO_STATE_RESET, or, where
 *                 there is no error feedback, SOTTO_STATE_MEAN
 *   buf     [out] cap bytes; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed
 * Threads: one per handle, not from callbacks. Blocks: until the average under way has ended, at
 * most its deadline. Errors: INVALID_ARGUMENT (mode), UNSUPPORTED (MEAN where there is error
 * feedback), BUSY (step in flight), INVALID_STATE (fork, callback). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_state_export(const sotto_outer* outer, sotto_state_mode mode,
                                                void* buf, uint64_t cap, uint64_t* out_len);

/* Replaces this rank's state, live parameters and model copies included. Exact: of the same rank:
 * it continues bit for bit. Other modes: of any rank, without error feedback. From as many ranks
 * live parameters become those of that rank, so what this one had changed since the last launch is
 * not in them; a rank may import in mode exact beside others in mode common. From another number of
 * ranks live parameters become the anchor, and no average is under way.
 * Learning rates, momentum, penalty and clip may be others than those of the export. Nothing
 * changes on error. Bits of sotto_outer_vote and a "retune" that no average has taken are dropped;
 * "weight" and "loss" stay as they are here. The first step or flush afterwards compares the states
 * of the ranks, PROTOCOL names those of another step or anchor.
 *   outer [in]
 *   mode  [in] SOTTO_STATE_EXACT, SOTTO_STATE_COMMON, SOTTO_STATE_RESET, SOTTO_STATE_MEAN
 *   buf   [in] what an export wrote
 *   len   [in] bytes of buf
 * Threads: one per handle, not from callbacks. Blocks: until the average under way has ended.
 * Errors: INVALID_ARGUMENT (truncated, damaged; of other settings or parameters; EXACT: of another
 * rank or world size; else: of another world size with freshness), UNSUPPORTED (newer format), BUSY
 * (step in flight), INVALID_STATE (fork, callback). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_state_import(sotto_outer* outer, sotto_state_mode mode,
                                                const void* buf, uint64_t len);

/* Destroys the outer optimizer; live parameters stay as they are. Averages under way are not
 * consumed; slices (sotto_outer_step) go at once. The handle is gone whatever is returned, except
 * for INVALID_STATE.
 *   outer [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: waits for averages under way, at most their
 * deadline. Errors: INVALID_STATE (fork, callback). Since: 0.2 */
SOTTO_API sotto_status sotto_outer_destroy(sotto_outer* outer);

/* What outer steps would cost, without a group: exposed time, the shortest delay that hides an
 * average, bytes and memory for every preset and codec, and which one to take, as JSON
 * (specification co2-overlap, sections 12.3 and 12.4). Bytes are those of the plans that ranks
 * would run (payload_bytes_next_launch of rank 0). Memory is state_bytes of sotto_outer_info from
 * the second boundary on that has the codec. An average takes the time of its wire and of its
 * kernels, one after the other. Kernels are run here, on up to 4194304 elements.
 *   json    [in]  an object with
 *                   "params"         elements of the model, or a list with those of each tensor;
 *                                    2^34 in all
 *                   "ranks"          1 to 1024
 *                   "bandwidth_mbit" of a rank, in each direction, 10^6 bits per second, > 0
 *                   "step_ms"        an inner step, > 0
 *                 and perhaps
 *                   "config"         the text of a configuration file, the object that it holds, or
 *                                    its "sotto.outer": predicted beside the presets
 *                   "latency_ms"     one way; 0 without it
 *                   "message_us"     what a message costs beside its bytes; 0
 *                   "efficiency"     share of the bandwidth that is left for messages, in (0, 1];
 *                                    0.956, as TCP's on Ethernet
 *                   "contention"     how much longer a step is beside an average, as a share; 0
 *                   "threads"        1 to 4096, for kernels; as contexts have them
 *                   "segment_bytes"  as SOTTO_SEGMENT_BYTES
 *                   "rates"          nanoseconds per element that are not measured then: {"fp32":
 *                                    of a sum, "onebit": of a codec by its name, "outer": of launch
 *                                    and update}
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written,
 *                 and the next call with this json on this thread has the same text
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: any. Blocks: while it measures and plans: seconds, and 20 for every 10^9 parameters.
 * Errors: INVALID_ARGUMENT (names the key, what was found and what is allowed), OUT_OF_MEMORY.
 * Since: 0.2 */
SOTTO_API sotto_status sotto_predict_report(const char* json, char* buf, uint64_t cap,
                                            uint64_t* out_len);

/* ---- overlap ----------------------------------------------------------------------------------
 */

/* An overlap averages gradients while others are still being computed. A round is one operation:
 * sotto_overlap_begin opens it, sotto_overlap_ready says which gradients are final, as soon as they
 * are, sotto_overlap_finish that nothing more comes, and the operation ends when all of them are
 * averages. Gradients are sent in buckets, each when its last gradient is there, in one order on
 * all ranks. Results have the bits of one sotto_all_reduce of all gradients. */

/* Creates an overlap of n gradients. Collective: counts, dtypes and settings are compared; if one
 * rank refuses, whatever the reason, all of them end with its code and text, and the comm stays as
 * it is.
 *   comm        [in]  outlives the overlap, whose rounds go on beside its collectives. Over NCCL,
 *                     which matches by order, all ranks call sotto_overlap_begin and collectives,
 *                     and mark the last gradients of buckets, in one order
 *   json        [in]  object; every key may be left out:
 *                     {"first_bucket_bytes": 1048576, "bucket_bytes": 26214400,
 *                      "order": "reversed" | "registered" | "observed", "unused": "error" | "zero",
 *                      "wire": "fp32" | "fp16" | "bf16", "codec": {...}}
 *                     A bucket ends with the gradient that makes it as long as its bytes, or
 *                     longer; the first one is shorter, not longer unless set. order: in
 *                     which gradients are put into buckets, and buckets are launched; "observed":
 *                     as "reversed" until a round has ended well, then that in which they became
 *                     ready on rank 0 (error feedback moves along). unused: what
 *                     gradients are that are missing at sotto_overlap_finish. wire: type that is
 *                     sent and added up; without it each gradient's own. codec: as json of
 *                     sotto_codec_create, or its type alone, and in place of wire: every bucket is
 *                     compressed on its own, in fp32, with error feedback that a round changes only
 *                     if it ends well; granularity is inside a bucket. Without a codec rounds have
 *                     the levels of the comm's collectives (SOTTO_HIERARCHY)
 *   like        [in]  n buffers, all on one device: count, dtype (fp32, fp16 or bf16) and, if data
 *                     is not NULL, where the gradient is in every round. Then it is borrowed until
 *                     the overlap is destroyed
 *   n           [in]  > 0
 *   out_overlap [out] owned by the caller: sotto_overlap_destroy
 * Threads: one per comm, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (names the key or the buffer), UNSUPPORTED (dtype, device), PROTOCOL (ranks
 * differ), INVALID_STATE (fork, callback), the comm's own. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_create(sotto_comm* comm, const char* json,
                                            const sotto_buffer* like, uint64_t n,
                                            sotto_overlap** out_overlap);

/* Creates an overlap whose rounds are steps of an optimizer: sotto_optim_step that begins before
 * its gradients are there. Gradient i is that of parameter i, where the optimizer has it unless
 * sotto_overlap_ready says otherwise; a round reads it, and changes parameters and state as
 * sotto_optim_step does, to the bit: all of it, or nothing. Averages in full precision and buckets
 * of 1-bit types ("sotto": {"granularity": "bucket", "bucket_elements"}) are sent as gradients
 * become ready; what needs all gradients, as gradient_clipping before a 1-bit average, comes at the
 * end, and sotto_overlap_report says so ("hidden", "why"). Collective, as sotto_overlap_create.
 *   optim       [in]  outlives the overlap; without "sotto": {"outer"} and mode "compat". While a
 *                     round is open its step is in flight: calls that change it are BUSY. Error
 *                     feedback is part of its state; a round needs as much memory again for it
 *   json        [in]  NULL: "sotto": {"overlap": {...}} of the optimizer's file, or the defaults.
 *                     Else as sotto_overlap_create, without wire and codec, which are the
 *                     optimizer's, and for 1-bit types with buckets without bucket sizes
 *   out_overlap [out] owned by the caller: sotto_overlap_destroy
 * Threads: one per comm, not from callbacks. Blocks: yes, at most the comm's timeout. Errors:
 * INVALID_ARGUMENT (names the key), UNSUPPORTED (outer steps, mode compat), BUSY (a step is in
 * flight), PROTOCOL (ranks differ), INVALID_STATE (fork, callback), the comm's own. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_create_step(sotto_optim* optim, const char* json,
                                                 sotto_overlap** out_overlap);

/* Opens a round. Its operation ends when all gradients have become their averages over ranks, in
 * place, or the step is done. Collective: all ranks make the same calls in the same order.
 * Time counts against the operation's deadline only while no gradient of this rank is missing. If
 * it fails, gradients of the round are undefined, unless it is a step, which only reads them.
 *   overlap [in]
 *   call    [in]  may be NULL; codec must be NULL. reduce: 0 is mean, or SOTTO_REDUCE_SUM without
 *                 a codec; of steps 0
 *   out_op  [out] owned by the caller: sotto_op_release; not NULL
 * Threads: one per handle, not from callbacks. Blocks: only for a free operation slot; with a codec
 * and order "observed" the call behind the first round that has ended well waits for all ranks.
 * Stream: the gradients that sotto_overlap_unused names get their zeros after work queued on
 * call->stream. Errors: BUSY (a round is open or in flight) and the common errors of collectives,
 * of steps those of sotto_optim_step; from the operation also CANCELLED (sotto_overlap_withdraw of
 * any rank; the group is healthy) and, with a codec, NONFINITE (error feedback is as before; the
 * group is healthy). Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_begin(sotto_overlap* overlap, const sotto_call* call,
                                           sotto_op** out_op);

/* Gradients are final: they may be read and overwritten by the round until its operation ends.
 *   overlap [in]
 *   indices [in] n numbers of gradients, none of which was marked before in this round
 *   grads   [in] NULL: where `like` said; else n buffers, where each of them is in this round (same
 *                dtype, count and device; they overlap nothing)
 *   n       [in] 0: nothing happens
 *   stream  [in] a cudaStream_t: gradients are final behind what is queued on it; NULL its default
 *                stream; ignored for host memory
 * Threads: any, at the same time, not from callbacks. Blocks: no. Stream: reads and writes after
 * work queued on `stream`; those of one bucket may be several. Errors: INVALID_ARGUMENT (names the
 * index or the buffer), INVALID_STATE (marked before; no open round; a stream that is being
 * captured; fork, callback), or what the operation has ended with. Nothing changes on error.
 * Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_ready(sotto_overlap* overlap, const uint64_t* indices,
                                           const sotto_buffer* grads, uint64_t n, void* stream);

/* Gradients that this rank does not have in this round: they count as zero, and a mean is still
 * divided by the number of ranks. Where `like` said where a gradient is, zeros are written there
 * and it becomes the average as all others; else this rank does not get the average. Steps write
 * nothing there.
 *   overlap [in]
 *   indices [in] n numbers of gradients, none of which was marked before in this round
 *   n       [in] 0: nothing happens
 * Threads: any, at the same time, not from callbacks. Blocks: only for a free operation slot.
 * Errors: as sotto_overlap_ready, OUT_OF_MEMORY. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_unused(sotto_overlap* overlap, const uint64_t* indices,
                                            uint64_t n);

/* Nothing more comes in this round. Gradients that were not marked are as those of
 * sotto_overlap_unused with "unused": "zero"; else the call names them, and the round stays open.
 *   overlap [in]
 * Threads: one per handle, not from callbacks. Blocks: as sotto_overlap_unused. Errors:
 * INVALID_STATE (names gradients that are missing; no open round; fork, callback), OUT_OF_MEMORY,
 * or what the operation has ended with. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_finish(sotto_overlap* overlap);

/* This rank gives the open round up: its operation ends with CANCELLED on every rank, when all of
 * them have finished or withdrawn. Gradients are undefined then, unless they are a step's, which
 * has changed nothing, and the next round is as any.
 *   overlap [in]
 *   reason  [in] for the texts of all ranks, of which 251 bytes are sent; may be NULL
 * Threads: one per handle, not from callbacks. Blocks: no. Errors: INVALID_STATE (no open round;
 * fork, callback), OUT_OF_MEMORY (for what is sent in place of missing gradients; nothing has
 * changed), or what the operation has ended with. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_withdraw(sotto_overlap* overlap, const char* reason);

/* Hot figures of an overlap. struct_size in, the rest out. Times are those of the last round that
 * ended well; -1: there was none. Bytes are those of the round that began last, or of the next. */
typedef struct sotto_overlap_info {
  uint32_t struct_size;
  uint32_t buckets;
  uint64_t rounds;                /* that ended well */
  uint64_t layout;                /* how often order or buckets have changed */
  int64_t begin_to_last_ready_ns; /* from sotto_overlap_begin to the last gradient */
  int64_t network_ns;             /* from the first bucket that was complete to the end */
  int64_t exposed_ns;             /* from sotto_overlap_finish to the end */
  uint64_t payload_bytes_per_round;
  uint64_t header_bytes_per_round;
  uint64_t state_bytes; /* memory held */
  uint32_t missing;     /* gradients of the open round that are not marked; 0: none, or no round */
  uint32_t reserved;
  uint64_t early_payload_bytes_per_round; /* sent before the last bucket's gradients are there */
} sotto_overlap_info;
#define SOTTO_OVERLAP_INFO_INIT \
  { sizeof(sotto_overlap_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Reads the hot figures.
 *   overlap  [in]
 *   out_info [in,out] struct_size set by the caller; zeroed beyond what the library knows
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (struct_size), INVALID_STATE
 * (fork). Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_get_info(const sotto_overlap* overlap,
                                              sotto_overlap_info* out_info);

/* Report as JSON.
 *   overlap [in]
 *   kind    [in]  NULL or "all"; "buckets" (bytes and gradients of each), "order" (gradients in the
 *                 order of launches)
 *   buf     [out] cap bytes, zero-terminated; NULL or too small: nothing but out_len is written
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed, without the final zero
 * Threads: one per handle. Blocks: no. Errors: INVALID_ARGUMENT (unknown kind), INVALID_STATE
 * (fork). Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_report(const sotto_overlap* overlap, const char* kind,
                                            char* buf, uint64_t cap, uint64_t* out_len);

/* Saves error feedback, between rounds.
 *   overlap [in]
 *   mode    [in]  SOTTO_STATE_EXACT (goes on bit for bit on the same ranks with the same buckets),
 *                 SOTTO_STATE_RESET (without error feedback), SOTTO_STATE_MEAN (mean over ranks in
 *                 the order of gradients, for any number of ranks and any buckets; a collective)
 *   buf     [out] cap bytes; NULL or too small: nothing but out_len is written, no rank is asked
 *   cap     [in]  bytes of buf
 *   out_len [out] bytes needed
 * Threads: one per handle, not from callbacks. Blocks: SOTTO_STATE_MEAN until all ranks have called
 * it. Errors: INVALID_STATE (no codec, or steps; fork, callback), BUSY (a round is open or in
 * flight), INVALID_ARGUMENT (mode), the comm's own. Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_state_export(const sotto_overlap* overlap,
                                                  sotto_state_mode mode, void* buf, uint64_t cap,
                                                  uint64_t* out_len);

/* Error feedback becomes what was saved, between rounds.
 *   overlap [in]
 *   mode    [in] that of the export; SOTTO_STATE_RESET takes any, and error feedback becomes 0
 *   buf     [in] len bytes of an export; borrowed during the call
 *   len     [in]
 * Threads: one per handle, not from callbacks. Blocks: no. Errors: INVALID_ARGUMENT (damaged; of
 * other gradients, settings, buckets or ranks; mode), UNSUPPORTED (newer format), BUSY (a round is
 * open or in flight), INVALID_STATE (no codec; fork, callback). Nothing changes on error.
 * Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_state_import(sotto_overlap* overlap, sotto_state_mode mode,
                                                  const void* buf, uint64_t len);

/* Destroys the overlap. From an open round this rank withdraws; a round in flight ends first. The
 * handle is gone whatever is returned, except for INVALID_STATE.
 *   overlap [in] NULL: nothing happens
 * Threads: one per handle, not from callbacks. Blocks: waits for the round, at most its deadline.
 * Errors: INVALID_STATE (fork, callback). Since: 0.2 */
SOTTO_API sotto_status sotto_overlap_destroy(sotto_overlap* overlap);

#ifdef __cplusplus
}
#endif

#endif /* SOTTO_SOTTO_H */
