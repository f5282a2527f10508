// The calls.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/comm.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/emulation/nccl/reduce.h"

using namespace sotto::fake_nccl;
using sotto::fake_cuda::Quiet;

namespace {

enum What : uint32_t { kP2p, kAllReduce, kAllGather, kReduceScatter, kBroadcast, kSplit };
uint32_t what(What kind, ncclDataType_t type, int detail = 0) {
  return static_cast<uint32_t>(kind) | static_cast<uint32_t>(type) << 8 |
         static_cast<uint32_t>(detail) << 16;
}

std::mutex g_mutex;
// Never destroyed: at the end of a process communicators may be left.
std::map<ncclComm_t, CommRef>& g_comms = *new std::map<ncclComm_t, CommRef>;
uint64_t g_next_handle = 0x100;
uint64_t g_calls = 0;
uint64_t g_fail_at = UINT64_MAX;
ncclResult_t g_fail_with = ncclSuccess;
std::string g_failed_call;
std::atomic<bool> g_finalize_hangs{false};
std::map<std::string, uint64_t>& g_calls_of = *new std::map<std::string, uint64_t>;
std::string& g_sent = *new std::string;

thread_local int t_depth = 0;
thread_local std::vector<Operation> t_group;
thread_local std::vector<std::function<void()>> t_ends;  // of communicators, in the group

ncclResult_t begin(const char* name, int since = 21400) {
  if (environment().version < since) {
    misuse(std::string(name) + " is called, but NCCL " + std::to_string(environment().version) +
           " has no such function: it came with " + std::to_string(since));
  }
  Quiet quiet;
  std::lock_guard lock(g_mutex);
  ++g_calls_of[name];
  if (g_calls++ != g_fail_at) return ncclSuccess;
  g_fail_at = UINT64_MAX;
  g_failed_call = name;
  return g_fail_with;
}
#define FAKE_NCCL_BEGIN(...)                                               \
  do {                                                                     \
    const ncclResult_t begun = begin(__func__ __VA_OPT__(, ) __VA_ARGS__); \
    if (begun != ncclSuccess) return begun;                                \
  } while (0)

CommRef find(ncclComm_t handle, const char* call) {
  Quiet quiet;
  std::lock_guard lock(g_mutex);
  const auto it = g_comms.find(handle);
  if (it == g_comms.end())
    misuse(std::string(call) + ": a communicator that was never made or has been destroyed");
  return it->second;
}

ncclComm_t add(CommRef comm) {
  Quiet quiet;
  std::lock_guard lock(g_mutex);
  const auto handle = reinterpret_cast<ncclComm_t>(g_next_handle += 16);
  g_comms[handle] = std::move(comm);
  return handle;
}

void remove(ncclComm_t handle) {
  Quiet quiet;
  std::lock_guard lock(g_mutex);
  g_comms.erase(handle);
}

// A communicator is used by one thread at a time, and when it is ready.
class Use {
 public:
  Use(CommRef comm, const char* call) : comm_(std::move(comm)) {
    Quiet quiet;
    if (comm_->in_call.exchange(true))
      misuse(std::string(call) + ": another thread uses the communicator at the same time");
    const std::thread::id owner = comm_->group_thread;
    if (owner != std::thread::id() && owner != std::this_thread::get_id())
      misuse(std::string(call) + ": another thread has operations of the communicator in a group");
    if (comm_->under_way > 0)
      misuse(std::string(call) +
             ": the communicator is in progress; ncclCommGetAsyncError tells when it is not");
    if (comm_->finalized) misuse(std::string(call) + ": the communicator is finalized");
  }
  ~Use() {
    Quiet quiet;
    comm_->in_call = false;
  }

 private:
  CommRef comm_;
};

void note_sent(const std::vector<Operation>& group) {
  Quiet quiet;
  std::string sent;
  for (const Operation& o : group) {
    if (std::strcmp(o.name, "ncclSend") != 0) continue;
    sent += sent.empty() ? "" : " ";
    sent += std::to_string(o.peer) + ":" + std::to_string(o.buffers[0].second);
  }
  std::lock_guard lock(g_mutex);
  if (!sent.empty()) g_sent += sent + ";";
}

ncclResult_t flush() {
  if (t_depth > 0 || t_group.empty()) return ncclSuccess;
  note_sent(t_group);
  return launch(std::exchange(t_group, {}));
}

struct Buffer {
  const void* at;
  size_t bytes;
};

// `peer`: the rank that it sends to (`sends`) or receives from; -1: both with each other rank.
struct Between {
  What kind;
  int peer = -1;
  bool sends = false;
};

std::vector<PairConnection> connections_of(const Comm& comm, const Between& between) {
  std::vector<PairConnection> all;
  for (int r = 0; r < comm.size; ++r) {
    if (r == comm.rank || (between.peer >= 0 && r != between.peer)) continue;
    for (const bool sends : {false, true}) {
      if (between.peer < 0 || sends == between.sends) all.push_back({between.kind, r, sends});
    }
  }
  return all;
}

ncclResult_t submit(ncclComm_t handle, cudaStream_t stream, const char* name,
                    const Between& between, std::vector<Buffer> buffers,
                    std::function<ncclResult_t(Comm&, int)> run) {
  const CommRef comm = find(handle, name);
  const Use use(comm, name);
  if (const ncclResult_t broken = comm->async_error(); broken != ncclSuccess) return broken;
  int device = -1;
  if (cudaStreamGetDevice(stream, &device) != cudaSuccess) return ncclUnhandledCudaError;
  if (device != comm->device) {
    misuse(std::string(name) + " on a stream of device " + std::to_string(device) +
           ", but the communicator is of device " + std::to_string(comm->device));
  }
  Operation operation{comm,          stream, name, between.peer, {}, connections_of(*comm, between),
                      std::move(run)};
  for (const Buffer& b : buffers) {
    fake_cuda_check_reachable(b.at, b.bytes, name);
    operation.buffers.emplace_back(b.at, b.bytes);
  }
  if (t_depth > 0) {
    Quiet quiet;
    comm->group_thread = std::this_thread::get_id();
  }
  t_group.push_back(std::move(operation));
  return flush();
}

struct Place {
  int color, key, rank;
};

// All members' places; an exchange over the link.
ncclResult_t gather_places(Comm& c, const Place& mine, std::vector<Place>* all) {
  const uint32_t code = what(kSplit, ncclInt8);
  all->resize(static_cast<size_t>(c.size));
  (*all)[static_cast<size_t>(c.rank)] = mine;
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank) continue;
    if (const auto e = c.send(r, code, &mine, sizeof mine, LinkChannel::kSetup); e != ncclSuccess)
      return e;
  }
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank) continue;
    const auto e =
        c.receive(r, code, &(*all)[static_cast<size_t>(r)], sizeof mine, LinkChannel::kSetup);
    if (e != ncclSuccess) return e;
  }
  return ncclSuccess;
}

uint64_t mix(uint64_t a, uint64_t b) {
  a ^= b + 0x9e3779b97f4a7c15u + (a << 6) + (a >> 2);
  a *= 0xff51afd7ed558ccdu;
  return a ^ (a >> 33);
}

// Since 2.22 the end of a communicator is a job of the group that is open. What runs on its device
// is told at once.
void end_now_or_with_group(std::function<void()> end) {
  if (t_depth > 0 && environment().version >= 22200) {
    t_ends.push_back(std::move(end));
  } else {
    end();
  }
}

void give_memory_back(const Comm& comm) {
  comm.wait_pending();
  comm.wait_graphs();
  wait_for_device();
}

bool valid_config(const ncclConfig_t* config) {
  constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
  return config == nullptr || (config->magic == kInitial.magic && config->size >= 48 &&
                               static_cast<int>(config->version) <= environment().version);
}

}  // namespace

extern "C" {

// ---- Steering ----

void fake_nccl_fail_call(uint64_t k, int result) {
  std::lock_guard lock(g_mutex);
  g_fail_at = g_calls + k;
  g_fail_with = static_cast<ncclResult_t>(result);
  g_failed_call.clear();
}

uint64_t fake_nccl_calls() {
  std::lock_guard lock(g_mutex);
  return g_calls;
}

uint64_t fake_nccl_calls_of(const char* name) {
  std::lock_guard lock(g_mutex);
  return g_calls_of[name];
}

const char* fake_nccl_failed_call() {
  static thread_local std::string name;
  std::lock_guard lock(g_mutex);
  name = g_failed_call;
  return name.c_str();
}

uint64_t fake_nccl_live_comms() {
  std::lock_guard lock(g_mutex);
  return g_comms.size();
}

const char* fake_nccl_sent() {
  static thread_local std::string sent;
  std::lock_guard lock(g_mutex);
  sent = std::exchange(g_sent, {});
  return sent.c_str();
}

void fake_nccl_hang_finalize(bool on) { g_finalize_hangs = on; }

void fake_nccl_break(void* comm, int result) {
  find(static_cast<ncclComm_t>(comm), __func__)->fail(static_cast<ncclResult_t>(result));
}

// ---- About the library ----

ncclResult_t ncclGetVersion(int* version) {
  FAKE_NCCL_BEGIN();
  *version = environment().version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return "the fake NCCL keeps no log"; }

// ---- Communicators ----

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  FAKE_NCCL_BEGIN();
  const std::string name = Link::make_rendezvous();
  if (name.empty()) return ncclSystemError;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  FAKE_NCCL_BEGIN();
  if (out == nullptr || size < 1 || rank < 0 || rank >= size || !valid_config(config))
    return ncclInvalidArgument;
  *out = nullptr;
  auto comm = sotto::fake_cuda::make_ref<Comm>();
  comm->rendezvous = id.internal;
  comm->id = std::hash<std::string>{}(comm->rendezvous);
  comm->rank = rank;
  comm->size = size;
  for (int r = 0; r < size; ++r) comm->world.push_back(r);
  if (cudaGetDevice(&comm->device) != cudaSuccess) return ncclUnhandledCudaError;
  comm->blocking = config == nullptr || config->blocking != 0;
  if (comm->blocking) {
    if (const ncclResult_t e = connect(*comm); e != ncclSuccess) return e;
    *out = add(comm);
    return ncclSuccess;
  }
  comm->under_way = 1;
  comm->worker = std::thread([c = comm.get()] {
    connect(*c);
    --c->under_way;
  });
  *out = add(comm);
  return ncclInProgress;
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out,
                           ncclConfig_t* config) {
  FAKE_NCCL_BEGIN(21800);
  const CommRef comm = find(handle, __func__);
  const Use use(comm, __func__);
  if (!valid_config(config) || out == nullptr) return ncclInvalidArgument;
  *out = nullptr;
  std::vector<Place> all;
  const ncclResult_t gathered = gather_places(*comm, {color, key, comm->rank}, &all);
  if (gathered != ncclSuccess) return gathered;
  const uint64_t id = mix(mix(comm->id, ++comm->splits), static_cast<uint64_t>(color));
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::erase_if(all, [&](const Place& p) { return p.color != color; });
  std::stable_sort(all.begin(), all.end(),
                   [](const Place& a, const Place& b) { return a.key < b.key; });
  auto child = sotto::fake_cuda::make_ref<Comm>();
  child->link = comm->link;
  child->linked = true;
  child->id = id;
  child->device = comm->device;
  child->blocking = config == nullptr ? comm->blocking : config->blocking != 0;
  child->size = static_cast<int>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    child->world.push_back(comm->world[static_cast<size_t>(all[i].rank)]);
    if (all[i].rank == comm->rank) child->rank = static_cast<int>(i);
  }
  *out = add(std::move(child));
  return ncclSuccess;
}

// Destroying and aborting work also when they are made to fail.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  const ncclResult_t begun = begin(__func__);
  const CommRef comm = find(handle, __func__);
  if (comm->under_way > 0) misuse("ncclCommDestroy: the communicator is in progress");
  if (comm->worker.joinable()) comm->worker.join();
  end_now_or_with_group([comm, handle] {
    give_memory_back(*comm);
    if (comm->link != nullptr) comm->link->leave(comm->id, comm->world, false);
    forget_captured(*comm);
    remove(handle);
  });
  return begun;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  const ncclResult_t begun = begin(__func__);
  const CommRef comm = find(handle, __func__);
  comm->aborted = true;
  if (comm->linked) comm->link->wake();
  if (comm->worker.joinable()) comm->worker.join();
  if (comm->link != nullptr) comm->link->wake();
  end_now_or_with_group([comm, handle] {
    give_memory_back(*comm);
    if (comm->link != nullptr) comm->link->leave(comm->id, comm->world, true);
    comm->link.reset();  // what graphs have of it does nothing any more
    remove(handle);
  });
  return begun;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  FAKE_NCCL_BEGIN();
  const CommRef comm = find(handle, __func__);
  const Use use(comm, __func__);
  comm->wait_pending();
  comm->finalized = true;
  if (comm->blocking) {
    comm->wait_graphs();
    return ncclSuccess;
  }
  if (!g_finalize_hangs && comm->graphs == 0) return ncclSuccess;
  ++comm->under_way;
  if (g_finalize_hangs) return ncclInProgress;
  if (comm->worker.joinable()) comm->worker.join();
  comm->worker = std::thread([c = comm.get()] {
    c->wait_graphs();
    --c->under_way;
  });
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  *result = find(handle, __func__)->async_error();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  FAKE_NCCL_BEGIN();
  *count = find(handle, __func__)->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  FAKE_NCCL_BEGIN();
  *rank = find(handle, __func__)->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  FAKE_NCCL_BEGIN();
  *device = find(handle, __func__)->device;
  return ncclSuccess;
}

// ---- Memory ----

ncclResult_t ncclMemAlloc(void** at, size_t bytes) {
  FAKE_NCCL_BEGIN(21900);
  return cudaMalloc(at, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* at) {
  FAKE_NCCL_BEGIN(21900);
  return cudaFree(at) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* at, size_t bytes, void** token) {
  FAKE_NCCL_BEGIN(21900);
  find(handle, __func__);
  fake_cuda_check_reachable(at, bytes, __func__);
  *token = at;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void*) {
  FAKE_NCCL_BEGIN(21900);
  find(handle, __func__);
  return ncclSuccess;
}

// ---- Groups and operations ----

ncclResult_t ncclGroupStart() {
  FAKE_NCCL_BEGIN();
  ++t_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t begun = begin(__func__);
  if (t_depth == 0) misuse("ncclGroupEnd without ncclGroupStart");
  if (--t_depth == 0) {
    for (const auto& end : std::exchange(t_ends, {})) end();
  }
  if (begun == ncclSuccess) return flush();
  for (const Operation& o : t_group) leave_group(*o.comm);
  t_group.clear();
  return begun;
}

ncclResult_t ncclSend(const void* from, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  if (peer < 0 || peer >= find(comm, __func__)->size) return ncclInvalidArgument;
  return submit(comm, stream, __func__, {kP2p, peer, true}, {{from, bytes}},
                [=](Comm& c, int phase) {
                  return phase == 0 ? c.send(peer, what(kP2p, ncclInt8), from, bytes) : ncclSuccess;
                });
}

ncclResult_t ncclRecv(void* to, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  if (peer < 0 || peer >= find(comm, __func__)->size) return ncclInvalidArgument;
  return submit(
      comm, stream, __func__, {kP2p, peer, false}, {{to, bytes}}, [=](Comm& c, int phase) {
        return phase == 1 ? c.receive(peer, what(kP2p, ncclInt8), to, bytes) : ncclSuccess;
      });
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t n, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  const uint32_t code = what(kAllReduce, type, op);
  return submit(comm, stream, __func__, {kAllReduce}, {{from, bytes}, {to, bytes}},
                [=](Comm& c, int phase) {
                  if (phase == 0) return send_to_all(c, code, from, bytes, false);
                  std::vector<char> sum;
                  const ncclResult_t e = reduce_in_order(c, code, from, &sum, n, type, op);
                  if (e == ncclSuccess) std::memcpy(to, sum.data(), bytes);
                  return e;
                });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  const uint32_t code = what(kReduceScatter, type, op);
  const auto all = bytes * static_cast<size_t>(find(comm, __func__)->size);
  return submit(comm, stream, __func__, {kReduceScatter}, {{from, all}, {to, bytes}},
                [=](Comm& c, int phase) {
                  if (phase == 0) return send_to_all(c, code, from, bytes, true);
                  std::vector<char> sum;
                  const ncclResult_t e =
                      reduce_in_order(c, code, part(from, bytes, c.rank), &sum, n, type, op);
                  if (e == ncclSuccess) std::memcpy(to, sum.data(), bytes);
                  return e;
                });
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t n, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  const uint32_t code = what(kAllGather, type);
  const auto all = bytes * static_cast<size_t>(find(comm, __func__)->size);
  return submit(
      comm, stream, __func__, {kAllGather}, {{from, bytes}, {to, all}}, [=](Comm& c, int phase) {
        if (phase == 0) return send_to_all(c, code, from, bytes, false);
        std::memmove(part(to, bytes, c.rank), from, bytes);
        for (int r = 0; r < c.size; ++r) {
          if (r == c.rank) continue;
          if (const auto e = c.receive(r, code, part(to, bytes, r), bytes); e != ncclSuccess)
            return e;
        }
        return ncclSuccess;
      });
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t n, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_BEGIN();
  const size_t bytes = n * type_bytes(type);
  const CommRef found = find(comm, __func__);
  if (root < 0 || root >= found->size) return ncclInvalidArgument;
  const uint32_t code = what(kBroadcast, type, root);
  std::vector<Buffer> buffers{{to, bytes}};
  if (found->rank == root) buffers.push_back({from, bytes});
  return submit(comm, stream, __func__, {kBroadcast}, buffers, [=](Comm& c, int phase) {
    if (c.rank != root) return phase == 1 ? c.receive(root, code, to, bytes) : ncclSuccess;
    if (phase == 0) return send_to_all(c, code, from, bytes, false);
    std::memmove(to, from, bytes);
    return ncclSuccess;
  });
}

}  // extern "C"
