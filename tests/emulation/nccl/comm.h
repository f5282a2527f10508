// Communicators and operations of the fake NCCL.
//
// Threads: what NCCL allows; other use ends the process.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <compare>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/emulation/cuda/ref.h"
#include "tests/emulation/nccl/link.h"

namespace sotto::fake_nccl {

[[noreturn]] void misuse(const std::string& text);

struct Environment {
  int version = NCCL_VERSION_CODE;
  bool hang_on_mismatch = false;
  int64_t max_delay_us = 0;
  uint64_t seed = 1;
};
const Environment& environment();

// One way between two ranks. NCCL makes it when the first operation of its kind uses it, and that
// takes both ranks.
struct PairConnection {
  uint32_t kind = 0;  // of operation
  int peer = -1;
  bool sends = false;
  auto operator<=>(const PairConnection&) const = default;
};

struct Comm {
  uint64_t id = 0;
  std::string rendezvous;  // where the ranks of a communicator that is no split meet
  int rank = 0, size = 0, device = 0;
  bool blocking = true;
  std::vector<int> world;      // member -> rank in the link
  std::shared_ptr<Link> link;  // null until ready
  uint64_t splits = 0;
  std::set<PairConnection> connections;  // that have been used

  std::atomic<int> error{ncclSuccess};  // asynchronous
  std::atomic<int> under_way{0};        // initialisation, launches: ncclInProgress
  std::atomic<bool> linked{false};      // `link` is not written any more
  std::atomic<int> pending{0};          // operations not yet executed
  std::atomic<int> graphs{0};           // that have operations of it
  std::atomic<bool> aborted{false};
  std::atomic<bool> finalized{false};
  std::atomic<bool> in_call{false};
  std::atomic<std::thread::id> group_thread{};  // who has operations of it in an open group
  std::thread worker;

  ncclResult_t fail(ncclResult_t result);  // keeps the first
  ncclResult_t async_error();              // looks for lost peers
  ncclResult_t send(int peer, uint32_t what, const void* data, size_t bytes,
                    LinkChannel channel = LinkChannel::kData);
  ncclResult_t receive(int peer, uint32_t what, void* data, size_t bytes,
                       LinkChannel channel = LinkChannel::kData);
  // Makes those that do not exist; returns when the peers have made them too, or it fails.
  ncclResult_t connect(const std::vector<PairConnection>& wanted);
  void wait_pending() const;
  void wait_graphs() const;
};
using CommRef = fake_cuda::Ref<Comm>;

// What NCCL does before it allocates or frees, with fake_nccl_wait_for_device. Of the current
// device.
void wait_for_device();

// Meets the other ranks; on success the communicator is ready.
ncclResult_t connect(Comm& comm);

// A part of the job of one stream. Phase 0 sends, phase 1 receives and finishes.
struct Operation {
  CommRef comm;
  cudaStream_t stream = nullptr;
  const char* name = "";
  int peer = -1;  // of a send or receive
  std::vector<std::pair<const void*, size_t>> buffers;
  std::vector<PairConnection> connections;
  std::function<ncclResult_t(Comm&, int phase)> run;
};

// Graphs with operations of it are not launched any more.
void forget_captured(const Comm& comm);

// No thread has operations of it in an open group any more.
void leave_group(Comm& comm);

// Queues operations, one job per stream, in the order of first use, when their connections exist:
// communicators that do not block are in progress until then.
ncclResult_t launch(std::vector<Operation> operations);

}  // namespace sotto::fake_nccl
