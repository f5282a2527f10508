#include "tests/emulation/nccl/comm.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"

namespace sotto::fake_nccl {
namespace {

std::atomic<uint64_t> g_executed{0};
std::atomic<uint64_t> g_hang_at{UINT64_MAX};
std::atomic<uint64_t> g_hanging{0};
std::atomic<uint64_t> g_connections{0};
std::atomic<bool> g_waits_for_device{false};

int64_t number(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::atoll(text);
}

Environment read_environment() {
  Environment e;
  e.version = static_cast<int>(number("FAKE_NCCL_VERSION", e.version));
  const char* mismatch = std::getenv("FAKE_NCCL_MISMATCH");
  e.hang_on_mismatch = mismatch != nullptr && std::strcmp(mismatch, "hang") == 0;
  e.max_delay_us = number("FAKE_NCCL_MAX_DELAY_US", 0);
  e.seed = static_cast<uint64_t>(number("FAKE_NCCL_SEED", 1));
  return e;
}

std::atomic<int64_t>& launch_delay_us() {
  static auto* const delay = new std::atomic<int64_t>(number("FAKE_NCCL_LAUNCH_DELAY_US", 0));
  return *delay;
}

// For the delay, or until the communicator is aborted.
void pause(const Comm& comm, int64_t us) {
  constexpr int64_t kSliceUs = 1000;
  for (; us > 0 && !comm.aborted; us -= kSliceUs)
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(us, kSliceUs)));
}

void hang(const Comm& comm) {
  ++g_hanging;
  while (!comm.aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --g_hanging;
}

struct Job {
  std::vector<Operation> operations;
  bool captured = false;  // executes once per launch of a graph
};

// What graphs have. Of communicators that were aborted until the end of the process: a graph may be
// in the middle of it.
std::mutex g_captured_mutex;
std::vector<std::unique_ptr<Job>>& captured_jobs() {
  static auto* const jobs = new std::vector<std::unique_ptr<Job>>;
  return *jobs;
}

// What a group needs first.
struct Missing {
  CommRef comm;
  std::vector<PairConnection> connections;
};

// On the stream's thread.
void execute(void* user) {
  Job* const job = static_cast<Job*>(user);
  const std::unique_ptr<Job> last(job->captured ? nullptr : job);
  if (job->captured)
    for (const Operation& o : job->operations) ++o.comm->pending;
  const uint64_t number = g_executed.fetch_add(1, std::memory_order_relaxed);
  if (environment().max_delay_us > 0) {
    std::mt19937_64 random(environment().seed * 7919 + number);
    std::this_thread::sleep_for(
        std::chrono::microseconds(random() % static_cast<uint64_t>(environment().max_delay_us)));
  }
  if (number == g_hang_at) hang(*job->operations.front().comm);
  for (const Operation& o : job->operations) {
    if (o.comm->aborted) continue;
    for (const auto& [at, bytes] : o.buffers) fake_cuda_check_reachable(at, bytes, o.name);
  }
  for (const int phase : {0, 1}) {
    for (const Operation& o : job->operations) {
      if (!o.comm->aborted && o.comm->error == ncclSuccess) o.run(*o.comm, phase);
    }
  }
  // As a kernel that waits for data which nothing brings any more.
  for (const Operation& o : job->operations) {
    if (o.comm->error != ncclSuccess) hang(*o.comm);
  }
  for (const Operation& o : job->operations) --o.comm->pending;
}

// A graph with an operation has been destroyed.
void leave_graph(void* user) {
  const std::unique_ptr<CommRef> comm(static_cast<CommRef*>(user));
  --(*comm)->graphs;
}

cudaError_t keep_in_graph(const CommRef& comm, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  cudaError_t kept = cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph);
#else
  cudaError_t kept = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph);
#endif
  if (kept != cudaSuccess) return kept;
  ++comm->graphs;
  auto user = std::make_unique<CommRef>(comm);
  cudaUserObject_t object = nullptr;
  kept = cudaUserObjectCreate(&object, user.get(), leave_graph, 1, cudaUserObjectNoDestructorSync);
  if (kept != cudaSuccess) {
    --comm->graphs;
    return kept;
  }
  (void)user.release();
  kept = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (kept != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  return kept;
}

ncclResult_t queue_jobs(std::vector<Operation> operations) {
  std::vector<cudaStream_t> order;
  std::map<cudaStream_t, std::unique_ptr<Job>> jobs;
  for (Operation& o : operations) {
    auto& job = jobs[o.stream];
    if (job == nullptr) {
      job = std::make_unique<Job>();
      order.push_back(o.stream);
    }
    // Orders nothing: what has executed is not before what is queued now.
    o.comm->pending.fetch_add(1, std::memory_order_relaxed);
    job->operations.push_back(std::move(o));
  }
  for (const cudaStream_t stream : order) {
    std::unique_ptr<Job>& job = jobs[stream];
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t queued = cudaStreamIsCapturing(stream, &capture);
    const bool captured = job->captured = capture != cudaStreamCaptureStatusNone;
    if (queued == cudaSuccess) queued = cudaLaunchHostFunc(stream, execute, job.get());
    if (queued == cudaSuccess && captured)
      queued = keep_in_graph(job->operations.front().comm, stream);
    if (queued != cudaSuccess) {
      for (const Operation& o : job->operations) {
        --o.comm->pending;
        o.comm->fail(ncclUnhandledCudaError);
      }
      return ncclUnhandledCudaError;
    }
    if (!captured) {
      (void)job.release();  // it may have executed already
      continue;
    }
    for (const Operation& o : job->operations) --o.comm->pending;
    fake_cuda::Quiet quiet;
    std::lock_guard lock(g_captured_mutex);
    captured_jobs().push_back(std::move(job));
  }
  return ncclSuccess;
}

}  // namespace

void misuse(const std::string& text) {
  std::fprintf(stderr, "fake NCCL: %s\n", text.c_str());
  std::fflush(stderr);
  std::abort();
}

const Environment& environment() {
  static const Environment* const e = new Environment(read_environment());
  return *e;
}

void forget_captured(const Comm& comm) {
  fake_cuda::Quiet quiet;
  std::lock_guard lock(g_captured_mutex);
  std::erase_if(captured_jobs(), [&](const std::unique_ptr<Job>& job) {
    return job->operations.front().comm.get() == &comm;
  });
}

void wait_for_device() {
  if (g_waits_for_device) cudaDeviceSynchronize();
}

void leave_group(Comm& comm) {
  fake_cuda::Quiet quiet;
  comm.group_thread = std::thread::id();
}

ncclResult_t Comm::fail(ncclResult_t result) {
  int none = ncclSuccess;
  error.compare_exchange_strong(none, result);
  return result;
}

ncclResult_t Comm::async_error() {
  if (under_way > 0) return ncclInProgress;
  if (link != nullptr && link->broken(id, world)) fail(ncclRemoteError);
  return static_cast<ncclResult_t>(error.load());
}

ncclResult_t Comm::send(int peer, uint32_t what, const void* data, size_t bytes,
                        LinkChannel channel) {
  return link->send(world[static_cast<size_t>(peer)], id, channel, what, data, bytes)
             ? ncclSuccess
             : fail(ncclRemoteError);
}

ncclResult_t Comm::receive(int peer, uint32_t what, void* data, size_t bytes, LinkChannel channel) {
  Message message;
  switch (link->receive(world[static_cast<size_t>(peer)], id, channel, aborted, &message)) {
    case Wait::kAborted: return ncclInternalError;
    case Wait::kPeerGone: return fail(ncclRemoteError);
    case Wait::kGot: break;
  }
  if (message.what != what || message.data.size() != bytes) {
    if (environment().hang_on_mismatch) {
      hang(*this);
      return ncclInternalError;
    }
    misuse("rank " + std::to_string(rank) + " expects " + std::to_string(bytes) +
           " bytes of operation " + std::to_string(what) + " from rank " + std::to_string(peer) +
           ", but it has sent " + std::to_string(message.data.size()) + " of operation " +
           std::to_string(message.what));
  }
  if (bytes != 0) std::memcpy(data, message.data.data(), bytes);
  return ncclSuccess;
}

ncclResult_t Comm::connect(const std::vector<PairConnection>& wanted) {
  if (wanted.empty()) return ncclSuccess;
  pause(*this, 1000 * number("FAKE_NCCL_CONNECT_DELAY_MS", 0));
  wait_for_device();
  g_connections += wanted.size();
  for (const PairConnection& c : wanted) {
    const LinkChannel mine = c.sends ? LinkChannel::kToReceiver : LinkChannel::kToSender;
    const ncclResult_t sent = send(c.peer, c.kind, nullptr, 0, mine);
    if (sent != ncclSuccess) return sent;
  }
  for (const PairConnection& c : wanted) {
    const LinkChannel theirs = c.sends ? LinkChannel::kToSender : LinkChannel::kToReceiver;
    const ncclResult_t got = receive(c.peer, c.kind, nullptr, 0, theirs);
    if (got != ncclSuccess) return got;
  }
  return ncclSuccess;
}

void Comm::wait_pending() const {
  // After an error of the device nothing executes any more.
  for (int current = 0; pending > 0 && cudaGetDevice(&current) == cudaSuccess;)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Comm::wait_graphs() const {
  while (graphs > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

ncclResult_t connect(Comm& comm) {
  // Asked each time: splits may take longer than their parent.
  pause(comm, 1000 * number("FAKE_NCCL_INIT_DELAY_MS", 0));
  comm.link = Link::make(comm.rendezvous, comm.rank, comm.size, comm.aborted);
  if (comm.link == nullptr) return comm.aborted ? ncclInternalError : comm.fail(ncclSystemError);
  comm.linked = true;
  return ncclSuccess;
}

namespace {

// Launches of a device that are late, from the next one on.
struct LateLaunches {
  uint64_t late = 0;
  uint32_t us = 0;
};
std::mutex g_late_mutex;
std::map<int, LateLaunches> g_late_launches;

int64_t launch_delay(int device) {
  const std::lock_guard lock(g_late_mutex);
  LateLaunches& of = g_late_launches[device];
  const bool late = (std::exchange(of.late, of.late >> 1) & 1) != 0;
  return std::max<int64_t>(launch_delay_us(), late ? of.us : 0);
}

}  // namespace

ncclResult_t launch(std::vector<Operation> operations) {
  std::vector<Missing> missing;
  bool later = false;
  const bool waits =
      std::ranges::any_of(operations, [](const auto& o) { return !o.comm->blocking; });
  const int64_t delay_us = waits ? launch_delay(operations.front().comm->device) : 0;
  for (const Operation& o : operations) {
    leave_group(*o.comm);
    auto of_comm = std::find_if(missing.begin(), missing.end(),
                                [&](const Missing& m) { return m.comm == o.comm; });
    if (of_comm == missing.end()) of_comm = missing.insert(missing.end(), {o.comm, {}});
    for (const PairConnection& c : o.connections) {
      if (o.comm->connections.insert(c).second) of_comm->connections.push_back(c);
    }
    later |= !o.comm->blocking && (!of_comm->connections.empty() || delay_us > 0);
  }
  if (!later) {
    for (const Missing& m : missing) {
      if (const auto e = m.comm->connect(m.connections); e != ncclSuccess) return e;
    }
    return queue_jobs(std::move(operations));
  }
  for (const Missing& m : missing) ++m.comm->under_way;
  Comm& first = *missing.front().comm;
  if (first.worker.joinable()) first.worker.join();
  first.worker = std::thread([missing, delay_us, all = std::move(operations)]() mutable {
    pause(*missing.front().comm, delay_us);
    cudaSetDevice(missing.front().comm->device);
    bool connected = true;
    for (const Missing& m : missing) connected &= m.comm->connect(m.connections) == ncclSuccess;
    if (connected && !missing.front().comm->aborted) queue_jobs(std::move(all));
    for (const Missing& m : missing) --m.comm->under_way;
  });
  return ncclInProgress;
}

}  // namespace sotto::fake_nccl

extern "C" void fake_nccl_hang(uint64_t k) {
  using namespace sotto::fake_nccl;
  g_hang_at = g_executed + k;
}

extern "C" void fake_nccl_delay_some(int device, uint64_t late, uint32_t us) {
  using namespace sotto::fake_nccl;
  const std::lock_guard lock(g_late_mutex);
  g_late_launches[device] = {late, us};
}

extern "C" uint64_t fake_nccl_connections() { return sotto::fake_nccl::g_connections; }

extern "C" void fake_nccl_wait_for_device(bool on) { sotto::fake_nccl::g_waits_for_device = on; }

extern "C" void fake_nccl_delay_launches(int64_t us) { sotto::fake_nccl::launch_delay_us() = us; }

extern "C" uint64_t fake_nccl_hanging() { return sotto::fake_nccl::g_hanging; }
