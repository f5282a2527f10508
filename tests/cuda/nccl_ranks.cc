// A rank of several, started by sotto-run: collectives, a codec and training steps on tensors of a
// CUDA device give over NCCL the bits that they give over TCP, whether the thread waits for them,
// streams do, or steps are in CUDA graphs. For real devices, one for each rank or one for all
// (tests/gpu.sh), and for the fakes.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/cuda/step_graph.h"

namespace sotto::test {
namespace {

std::vector<float> numbers(size_t n, int32_t rank, int seed) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t x =
        i * 7919 + static_cast<uint64_t>(rank) * 104729 + static_cast<uint64_t>(seed) * 1299709;
    v[i] = static_cast<float>(static_cast<int>(x % 20011) - 10005) / 997.0f;
  }
  return v;
}

// What comes behind a call: a thread that waits for it; work of the caller's stream, which uses the
// tensors at once, and the thread later; or, of steps, the thread behind the launch of a graph.
enum class Calls { kWaited, kStreamOrdered, kInGraphs };

using Call = std::function<sotto_status(const sotto_call*, sotto_op**)>;

// An operation, until the end of the object.
class Started {
 public:
  Started(Calls calls, const Tensors& tensors, const Call& start) {
    const sotto_call call = tensors.call();
    if (calls != Calls::kStreamOrdered) {
      OK(start(&call, nullptr));
      return;
    }
    OK(start(&call, &op_));
    OK(sotto_op_stream_wait(op_, tensors.stream()));
  }
  ~Started() { (void)sotto_op_release(op_); }
  Started(const Started&) = delete;
  Started& operator=(const Started&) = delete;
  void wait() {
    if (op_ != nullptr) OK(sotto_op_wait(op_, -1));
  }

 private:
  sotto_op* op_ = nullptr;
};

// Between calls the stream copies what one has brought to where the next one finds it.
std::string collectives(sotto_comm* comm, int32_t rank, int32_t size, int device, Calls calls) {
  constexpr size_t kN = 100'003;
  Tensors tensors(Where::kCuda, device);
  std::vector<float> sum = numbers(kN, rank, 1), sent = numbers(kN, rank, 2), from_root = sent;
  std::vector<float> gathered(kN * static_cast<size_t>(size)), first = sum;
  std::vector<int32_t> integers(kN, rank + 1);
  const sotto_buffer in_place = tensors.add(sum), in = tensors.add(sent);
  const sotto_buffer out = tensors.add(gathered), whole = tensors.add(integers);
  const sotto_buffer shared = tensors.add(from_root);
  tensors.add(first);
  std::vector<std::unique_ptr<Started>> started;
  const auto start = [&](const Call& call) {
    started.push_back(std::make_unique<Started>(calls, tensors, call));
  };
  start([&](auto* call, auto* op) {
    return sotto_all_reduce(comm, &in_place, &in_place, 1, call, op);
  });
  tensors.copy(first, sum);
  tensors.copy(sum, sent);
  start([&](auto* call, auto* op) {
    return sotto_all_reduce(comm, &in_place, &in_place, 1, call, op);
  });
  start([&](auto* call, auto* op) { return sotto_all_reduce(comm, &whole, &whole, 1, call, op); });
  start([&](auto* call, auto* op) { return sotto_all_gather(comm, &in, &out, 1, call, op); });
  tensors.copy(sent, first);
  tensors.copy(from_root, sent);
  start([&](auto* call, auto* op) {
    return sotto_broadcast(comm, &shared, &shared, 1, size - 1, call, op);
  });
  tensors.download();
  for (const auto& each : started) each->wait();
  return bytes_of(first) + bytes_of(sum) + bytes_of(integers) + bytes_of(gathered) +
         bytes_of(from_root);
}

// The parameters after every step. Behind each the stream copies them and writes other gradients.
std::string training(sotto_comm* comm, int32_t rank, int device, const char* json, Calls calls) {
  constexpr size_t kCounts[] = {70'001, 17, 1};
  constexpr int kSteps = 6;
  Tensors tensors(Where::kCuda, device);
  std::vector<float> p[3], g[3], next[3], seen[kSteps];
  sotto_param params[3] = {};
  for (size_t t = 0; t < 3; ++t) {
    p[t] = numbers(kCounts[t], 0, 3);
    g[t] = numbers(kCounts[t], rank, 4);
    next[t] = numbers(kCounts[t], rank, 5);
    params[t].struct_size = sizeof(sotto_param);
    params[t].param = tensors.add(p[t]);
    params[t].grad = tensors.add(g[t]);
    tensors.add(next[t]);
  }
  for (std::vector<float>& parameters : seen) {
    parameters = p[0];
    tensors.add(parameters);
  }
  sotto_optim* optim = nullptr;
  OK(sotto_optim_create(comm, json, params, 3, &optim));
  const auto behind = [&](std::vector<float>* parameters) {
    tensors.copy(*parameters, p[0]);
    for (size_t t = 0; t < 3; ++t) tensors.copy(g[t], next[t]);
  };
  for (std::vector<float>& parameters : seen) {
    StepGraph graph(tensors.stream());
    if (calls == Calls::kInGraphs && graph.record(optim) != SOTTO_E_INVALID_STATE) {
      OK(sotto_optim_replay(optim, graph.op()));
      graph.run();
      behind(&parameters);
      continue;
    }
    Started step(calls, tensors,
                 [&](auto* call, auto* op) { return sotto_optim_step(optim, call, op); });
    behind(&parameters);
    step.wait();
  }
  tensors.download();
  OK(sotto_optim_destroy(optim));
  std::string all = bytes_of(p[1]) + bytes_of(p[2]);
  for (const std::vector<float>& parameters : seen) all += bytes_of(parameters);
  return all;
}

std::string results(sotto_comm* comm, int32_t rank, int32_t size, int device, Calls calls) {
  std::string all = collectives(comm, rank, size, device, calls);
  sotto_comm* turned = nullptr;  // which has a communicator of its own
  OK(sotto_comm_split(comm, 0, -rank, &turned));
  all += collectives(turned, size - 1 - rank, size, device, calls);
  OK(sotto_comm_destroy(turned));
  for (const char* json :
       {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
        R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}}})"})
    all += training(comm, rank, device, json, calls);
  return all;
}

// The NCCL comm meets by an id that the ranks share over the TCP one.
sotto_comm* nccl_comm(sotto_context* context, sotto_comm* tcp, int32_t rank, int32_t size) {
  sotto_unique_id id = {};
  if (rank == 0) OK(sotto_unique_id_create(context, &id));
  const sotto_buffer bytes = {&id, sizeof id, SOTTO_UINT8, SOTTO_DEVICE_CPU, 0, 0};
  OK(sotto_broadcast(tcp, &bytes, &bytes, 1, 0, nullptr, nullptr));
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = rank;
  config.size = size;
  config.id = &id;
  config.transport = "nccl";
  sotto_comm* comm = nullptr;
  OK(sotto_comm_create(context, &config, &comm));
  return comm;
}

int run() {
  sotto_context* context = new_context();
  sotto_comm* tcp = nullptr;
  OK(sotto_comm_create(context, nullptr, &tcp));
  int32_t rank = 0, size = 0;
  OK(sotto_comm_rank(tcp, &rank));
  OK(sotto_comm_size(tcp, &size));
  int devices = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  const int device = rank % devices;
  CUDA_OK(cudaSetDevice(device));
  sotto_comm* nccl = nccl_comm(context, tcp, rank, size);
  const std::string routes = read_all([&](char* at, uint64_t cap, uint64_t* n) {
    return sotto_comm_report(nccl, "routes", at, cap, n);
  });
  const std::string over_tcp = results(tcp, rank, size, device, Calls::kWaited);
  std::string differ;
  const auto compare = [&](const char* what, sotto_comm* comm, Calls calls) {
    if (results(comm, rank, size, device, calls) != over_tcp) differ += std::string(" ") + what;
  };
  compare("ordered by streams over TCP;", tcp, Calls::kStreamOrdered);
  compare("waited for over NCCL;", nccl, Calls::kWaited);
  compare("ordered by streams over NCCL;", nccl, Calls::kStreamOrdered);
  compare("in graphs over NCCL;", nccl, Calls::kInGraphs);
  std::printf("rank %d of %d on cuda:%d: %zu bytes over NCCL are %s over TCP;%s %s\n", rank, size,
              device, over_tcp.size(), differ.empty() ? "those" : "NOT those", differ.c_str(),
              routes.c_str());
  OK(sotto_comm_destroy(nccl));
  OK(sotto_comm_destroy(tcp));
  OK(sotto_context_destroy(context));
  return differ.empty() ? 0 : 1;
}

}  // namespace
}  // namespace sotto::test

int main() {
  setenv("SOTTO_TRANSPORT", "tcp", 1);  // where ranks meet; the comms say what they use
  try {
    return sotto::test::run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "sotto-test-nccl_ranks: %s\n", e.what());
    return 1;
  }
}
