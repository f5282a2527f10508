// Row 30: Adam's update on a CUDA device, alone and as a step through the C API, for one large
// tensor and for a thousand small ones.
#include <fmt/core.h>

#include <chrono>

#include "tests/perf/capi_rank.h"
#include "tests/perf/gpu/gpu_benchmarks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 18) + 13;
constexpr uint64_t kSmallTensors = 1000;
constexpr uint64_t kSmallElements = 10'000'000;  // of all of them: more than a cache holds

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }

AdamGroupScalars adam_scalars() {
  AdamGroupScalars s;
  s.lr = 1e-4;
  s.b1 = 0.9f;
  s.one_minus_b1 = static_cast<float>(1 - 0.9);
  s.b2 = 0.999f;
  s.one_minus_b2 = static_cast<float>(1 - 0.999);
  s.eps = 1e-8f;
  s.weight_decay = 0.01f;
  s.c1 = 0.4f;
  s.c2 = 0.005f;
  return s;
}

// Sizes of `count` tensors with n elements together, from one element to twice the average.
std::vector<uint64_t> sizes_of(uint64_t n, uint64_t count) {
  std::vector<uint64_t> sizes;
  uint64_t left = n;
  for (uint64_t t = 0; t + 1 < count; ++t) {
    const uint64_t most = 2 * n / count;
    sizes.push_back(std::min(left - (count - 1 - t), 1 + t * 7919 % most));
    left -= sizes.back();
  }
  sizes.push_back(left);
  return sizes;
}

template <class Work>
struct Adam {
  Adam(Work& device, const std::vector<uint64_t>& sizes)
      : work(device), scalars(work.template zeros<AdamGroupScalars>(1)) {
    for (const uint64_t size : sizes) n += size;
    g = work.random(n, 11);
    p = work.random(n, 12);
    m = work.random(n, 13, 0.1f);
    v = work.positive(n, 14, 0.01f, 1e-4f);
    std::vector<void*> gs, ps;
    std::vector<Piece>& pieces = tables.emplace_back();
    uint64_t at = 0, block = 0;
    for (uint64_t t = 0; t < sizes.size(); ++t) {
      gs.push_back(g + at);
      ps.push_back(p + at);
      Piece& piece = pieces.emplace_back();
      piece.flat = at;
      piece.count = sizes[t];
      piece.tensor = static_cast<uint32_t>(t);
      piece.block = block;
      at += sizes[t];
      block += blocks_of(sizes[t]);
    }
    g_list = work.list_of(gs);
    p_list = work.list_of(ps);
    const AdamGroupScalars values = adam_scalars();
    work.put(scalars, &values, sizeof values);
  }
  void update() {
    work.run(KernelId::kAdam, {g_list, m, v, p_list, scalars, nullptr, nullptr}, &source, tables);
  }

  Work& work;
  uint64_t n = 0;
  float *g, *p, *m, *v;
  AdamGroupScalars* scalars;
  void *g_list, *p_list;
  std::vector<std::vector<Piece>> tables;
  SourceArgs source{};
};

std::string check(const std::shared_ptr<Device>& device, const Options& options) {
  const std::vector<uint64_t> sizes = sizes_of(std::min(options.n, kCheckElements), 100);
  GpuWork gpu(device);
  Workload cpu(options, SimdLevel::kScalar);
  Adam ours(gpu, sizes);
  Adam reference(cpu, sizes);
  for (int step = 0; step < 2; ++step) {
    ours.update();
    reference.update();
  }
  std::string e = device_difference(gpu, "p", ours.p, reference.p, 4 * ours.n);
  if (e.empty()) e = device_difference(gpu, "m", ours.m, reference.m, 4 * ours.n);
  if (e.empty()) e = device_difference(gpu, "v", ours.v, reference.v, 4 * ours.n);
  return e;
}

// AdamW of one rank through the C API; a step ends when the host has seen its end.
class Training {
 public:
  Training(GpuWork& gpu, int32_t device, const std::vector<uint64_t>& sizes) {
    context_ = new_context();
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.size = 1;
    config.transport = "inproc";
    must(sotto_comm_create(context_, &config, &comm_), "sotto_comm_create");
    std::vector<sotto_param> params(sizes.size());
    for (size_t t = 0; t < sizes.size(); ++t) {
      params[t].struct_size = sizeof(sotto_param);
      for (sotto_buffer* b : {&params[t].param, &params[t].grad})
        *b = {gpu.random(sizes[t], t), sizes[t], SOTTO_FLOAT32, SOTTO_DEVICE_CUDA, device, 0};
    }
    must(sotto_optim_create(comm_, R"({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})",
                            params.data(), params.size(), &optim_),
         "sotto_optim_create");
  }
  ~Training() {
    (void)sotto_optim_destroy(optim_);
    (void)sotto_comm_destroy(comm_);
    (void)sotto_context_destroy(context_);
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void step() { must(sotto_optim_step(optim_, nullptr, nullptr), "sotto_optim_step"); }

 private:
  sotto_context* context_ = nullptr;
  sotto_comm* comm_ = nullptr;
  sotto_optim* optim_ = nullptr;
};

double host_milliseconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

Case case_of(const char* variant, uint64_t n) {
  Case work;
  work.row = 30;
  work.benchmark = "gpu_optim";
  work.variant = variant;
  work.yardstick_name = "device copy";
  work.n = n;
  work.bytes_per_element = 28;
  work.share = 3.5;
  return work;
}

Turn step_turn(const std::shared_ptr<Device>& device, const std::vector<uint64_t>& sizes) {
  struct State {
    State(const std::shared_ptr<Device>& device, const std::vector<uint64_t>& sizes)
        : gpu(device), training(gpu, device->caps().id.index, sizes) {}
    GpuWork gpu;
    Training training;
  };
  auto state = std::make_shared<State>(device, sizes);
  return [state] { return host_milliseconds([&] { state->training.step(); }); };
}

}  // namespace

Turn gpu_large_step_turn(const std::shared_ptr<Device>& device, const Options& options) {
  return step_turn(device, {options.n});
}

Turn gpu_small_step_turn(const std::shared_ptr<Device>& device, const Options& options) {
  return step_turn(device, sizes_of(std::min(options.n, kSmallElements), kSmallTensors));
}

// No targets: these are next to other libraries' (tests/perf/peers_gpu.py).
void gpu_optim(const std::shared_ptr<Device>& device, const Options& options,
               std::vector<Measurement>* out) {
  const std::string error = check(device, options);
  const uint64_t small = std::min(options.n, kSmallElements);
  struct Model {
    const char *kernel, *step;
    std::vector<uint64_t> sizes;
  };
  for (const Model& model : {Model{"Adam, large", "step, large", {options.n}},
                             Model{"Adam, 1000", "step, 1000", sizes_of(small, kSmallTensors)}}) {
    GpuWork gpu(device);
    Case work = case_of(model.kernel, 0);
    Adam<GpuWork> ours(gpu, model.sizes);
    work.n = ours.n;
    work.error = error;
    work.ours_ms = [&] { return gpu.milliseconds([&] { ours.update(); }); };
    work.yardstick_ms = [&] {
      return gpu.milliseconds([&] { gpu.copy(ours.p, ours.g, 4 * ours.n); });
    };
    measure_into(work, options, out);
    if (!error.empty()) continue;
    Case step = case_of(model.step, ours.n);
    Training training(gpu, device->caps().id.index, model.sizes);
    step.ours_ms = [&] { return host_milliseconds([&] { training.step(); }); };
    step.yardstick_ms = work.yardstick_ms;
    measure_into(step, options, out);
  }
}

}  // namespace sotto::perf
