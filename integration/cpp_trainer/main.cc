// A trainer in C++ in one page, on sotto.hpp: 1-bit LAMB on several ranks.
//
//   sotto-run -n 4 -- cpp-trainer [CONFIG.json [RECORDED]]
//
// Without RECORDED every rank has samples of its own, and Sotto averages what they learn from them.
// RECORDED is the prefix of what the C trainer has written with --record: its steps are repeated,
// and end with the same parameters. Ranks find each other through the launcher's environment.
#include <sotto/sotto.hpp>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>

#include "tasks.h"

namespace {

constexpr const char* kConfig = R"({
  "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.02, "freeze_step": 60, "weight_decay": 0.0}},
  "gradient_clipping": 10.0
})";

std::vector<sotto::param> params_of(Task& task) {
  std::vector<sotto::param> params;
  for (const Tensor& t : task.tensors) {
    const auto part = [&](std::vector<float>& v) {
      return sotto::buffer_of(&v[t.offset], t.count);
    };
    params.push_back(
        sotto::param(t.name, part(task.weights)).grad(part(task.gradients)).group(t.group));
  }
  return params;
}

// Mean over ranks, the same number on all of them.
double average(sotto::comm& comm, double value) {
  double both[] = {value};
  sotto::wait(comm.all_reduce(both, sotto::call().reduce(sotto::reduce_op::mean)));
  return both[0];
}

bool same_on_all_ranks(sotto::comm& comm, const std::vector<float>& weights) {
  std::vector<float> low(weights.size()), high(weights.size());
  sotto::wait(comm.all_reduce(weights, low, sotto::call().reduce(sotto::reduce_op::min)));
  sotto::wait(comm.all_reduce(weights, high, sotto::call().reduce(sotto::reduce_op::max)));
  return std::memcmp(low.data(), high.data(), low.size() * sizeof(float)) == 0;
}

// FNV-1a of the bytes, as in the C trainer's summary.
std::uint64_t hash_of(const std::vector<float>& weights) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const unsigned char*>(weights.data());
  for (std::size_t i = 0; i < weights.size() * sizeof(float); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

int train(const std::string& config, const char* recorded) {
  sotto::context context = sotto::context::create();
  sotto::comm comm = sotto::comm::create(context);
  const int rank = comm.rank();
  std::unique_ptr<Task> task(recorded == nullptr ? static_cast<Task*>(new Regression(rank))
                                                 : new Recorded(recorded, rank));
  sotto::optim optim = sotto::optim::create(comm, config, params_of(*task));

  double loss = 0, first = 0, last = 0;
  for (int step = 0; task->next(&loss); ++step) {
    sotto::op op = optim.step();
    // Here: what touches neither weights nor gradients, as loading the next batch.
    op.wait();
    if (step % 50 != 0) continue;
    last = average(comm, loss);
    if (step == 0) first = last;
    if (rank == 0) std::printf("step %3d  loss %.4f\n", step, last);
  }
  const sotto_comm_counters counters = comm.counters();
  const bool same = same_on_all_ranks(comm, task->weights);
  if (rank == 0) {
    std::printf("sent %" PRIu64 " bytes, planned %" PRIu64 "; weights are %s on all ranks\n",
                counters.payload_bytes_sent, counters.payload_bytes_planned,
                same ? "equal" : "DIFFERENT");
    std::printf("hash of the weights: %016" PRIx64 "\n", hash_of(task->weights));
  }
  return same && task->reached(first, average(comm, loss)) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::string config = kConfig;
    if (argc > 1) {
      std::ifstream file(argv[1]);
      if (!file) throw std::runtime_error(std::string("cannot open ") + argv[1]);
      config.assign(std::istreambuf_iterator<char>(file), {});
    }
    return train(config, argc > 2 ? argv[2] : nullptr);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cpp-trainer: %s\n", e.what());
    return 1;
  }
}
