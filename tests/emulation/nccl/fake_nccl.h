// An NCCL for tests on machines without a GPU: libnccl.so.2 with the calls that a transport uses,
// on the fake CUDA runtime. Ranks are processes, or threads of one; they talk over local sockets,
// each with each. Operations execute in the order of their stream, groups as a whole, reductions in
// the order of ranks.
//
// An operation that cannot go on, because a rank is gone or the communicator is in error, holds up
// its stream until the communicator is aborted.
//
// A group is queued when each connection between two ranks that it is the first to use is made,
// which takes both of them: until then the communicator is in progress, or the call blocks.
//
// Communicators end, also by an abort, when all graphs that have operations of them are destroyed.
// Until then those that do not block are in progress behind ncclCommFinalize. Since 2.22 destroys
// and aborts in a group end with it; what runs on the device for an aborted one ends at once.
//
// What it does that NCCL would do silently or not at all: illegal use ends the process with a text
// (several threads on one communicator, unbalanced groups, buffers that are not the device's or are
// freed before the operation has executed, streams of another device, communicators that are
// destroyed, not yet ready, or of another version's making). Sizes that differ between a send and
// its receive do so too, unless FAKE_NCCL_MISMATCH=hang: then the receive never completes, as with
// NCCL.
//
// Environment, read when the library is loaded: FAKE_NCCL_VERSION (the header's; for example
// 21805), FAKE_NCCL_MISMATCH (end|hang), FAKE_NCCL_MAX_DELAY_US (0; before each operation),
// FAKE_NCCL_LAUNCH_DELAY_US (0; how long a non-blocking communicator is in progress after a group),
// FAKE_NCCL_INIT_DELAY_MS (0), FAKE_NCCL_CONNECT_DELAY_MS (0; before a group that makes
// connections; both are asked each time), FAKE_NCCL_SEED (1).
//
// This header declares what tests steer it with, to be looked up with dlsym.
#pragma once

#include <cstdint>

extern "C" {
// The k-th call from now on that returns an ncclResult_t, ncclCommGetAsyncError excepted, returns
// `result` and does nothing but for destroy and abort, which do their work.
void fake_nccl_fail_call(uint64_t k, int result);
// The k-th operation that is to execute never completes, until its communicator is aborted.
void fake_nccl_hang(uint64_t k);
// Operations that only an abort ends, of all ranks that are threads of this process.
uint64_t fake_nccl_hanging();
// Whether communicators that do not block are in progress, once they are finalized from now on,
// until they are aborted. So it is with NCCL while another rank of the machine does not finalize
// its own.
void fake_nccl_hang_finalize(bool on);
// Of the groups that non-blocking communicators of the device launch from now on, the k-th is in
// progress for `us` if bit k of `late` is set.
void fake_nccl_delay_some(int device, uint64_t late, uint32_t us);
// The communicator's asynchronous error, as from a broken network.
void fake_nccl_break(void* comm, int result);
// Calls so far, as fake_nccl_fail_call counts them.
uint64_t fake_nccl_calls();
// Calls of one name so far, of all ranks that are threads of this process.
uint64_t fake_nccl_calls_of(const char* name);
// Name of the call that was made to fail; empty: none.
const char* fake_nccl_failed_call();
uint64_t fake_nccl_live_comms();
// Connections that groups have made so far because they were the first to use them, of all ranks
// that are threads of this process. One of two ranks is one each way for each of them.
uint64_t fake_nccl_connections();
// Whether what allocates or frees, making connections and the end of a communicator, waits from now
// on until the device stands still, as cudaFree may.
void fake_nccl_wait_for_device(bool on);
// From now on, instead of FAKE_NCCL_LAUNCH_DELAY_US.
void fake_nccl_delay_launches(int64_t us);
// What groups have sent since the last call, of all ranks that are threads of this process, in the
// order of the calls: "1:104 1:4096;1:104;" is two messages to rank 1 in one group, and a third.
const char* fake_nccl_sent();
}
