#include "tests/perf/capi_rank.h"

#include <fmt/core.h>

#include <stdexcept>
#include <thread>

namespace sotto::perf {
namespace {

sotto_buffer buffer(std::vector<float>& data) {
  return {data.data(), data.size(), SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0};
}

}  // namespace

void must(sotto_status status, const char* what) {
  if (status == SOTTO_OK) return;
  throw std::runtime_error(
      fmt::format("{}: {}: {}", what, sotto_status_name(status), sotto_last_error()));
}

sotto_context* new_context() {
  sotto_context_config config = SOTTO_CONTEXT_CONFIG_INIT;
  config.cpu_threads = 1;
  sotto_context* context = nullptr;
  must(sotto_context_create(&config, &context), "context");
  return context;
}

void capi_world(int32_t size, const std::function<void(CapiRank&)>& body) {
  sotto_context* const first = new_context();
  sotto_unique_id id;
  must(sotto_unique_id_create(first, &id), "unique id");
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        CapiRank self{r, size, r == 0 ? first : new_context(), nullptr};
        sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
        config.rank = r;
        config.size = size;
        config.id = &id;
        config.transport = "tcp";
        must(sotto_comm_create(self.context, &config, &self.comm), "comm");
        body(self);
        must(sotto_comm_destroy(self.comm), "destroying the comm");
        must(sotto_context_destroy(self.context), "destroying the context");
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(r)] = fmt::format("rank {}: {}", r, e.what());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

CapiWork::CapiWork(const CapiRank& rank, const CapiKind& kind)
    : rank_(rank), in_(kind.elements), out_(kind.elements, 0.5f) {
  for (uint64_t i = 0; i < kind.elements; ++i)
    in_[i] = static_cast<float>((i * 31 + static_cast<uint64_t>(rank.rank) * 7) % 23) - 11;
  if (!kind.codec.empty()) {
    const sotto_buffer like = buffer(in_);
    must(sotto_codec_create(rank.comm, kind.codec.c_str(), &like, 1, &codec_), "codec");
  }
  if (kind.optimizer.empty()) return;
  sotto_param param = {};
  param.struct_size = sizeof param;
  param.param = buffer(out_);
  param.grad = buffer(in_);
  const std::string json = fmt::format(R"({{"optimizer": {{{}}}}})", kind.optimizer);
  must(sotto_optim_create(rank.comm, json.c_str(), &param, 1, &optim_), "optimizer");
}

CapiWork::~CapiWork() {
  sotto_optim_destroy(optim_);
  sotto_codec_destroy(codec_);
}

uint64_t CapiWork::held_bytes() const {
  const uint64_t n = in_.size();
  uint64_t state = 0;
  if (optim_ != nullptr) {
    sotto_optim_info info = {};
    info.struct_size = sizeof info;
    must(sotto_optim_get_info(optim_, &info), "info");
    state = info.state_bytes;
  } else if (codec_ != nullptr) {
    state = 4 * (n + n / static_cast<uint64_t>(rank_.size));  // worker's residual, server's
  }
  return 4 * (in_.size() + out_.size()) + state;
}

void CapiWork::run() {
  if (optim_ != nullptr) {
    must(sotto_optim_step(optim_, nullptr, nullptr), "step");
    return;
  }
  const sotto_buffer in = buffer(in_), out = buffer(out_);
  sotto_call call = SOTTO_CALL_INIT;
  call.reduce = SOTTO_REDUCE_MEAN;
  call.codec = codec_;
  must(sotto_all_reduce(rank_.comm, &in, &out, 1, &call, nullptr), "all-reduce");
}

}  // namespace sotto::perf
