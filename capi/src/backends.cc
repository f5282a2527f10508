// Composition root: the one file that sees every transport and device.
#include "capi/src/backends.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/json_text.h"
#include "core/config/optimizer_types.h"
#include "core/cpu/cpu_device.h"
#if SOTTO_WITH_CUDA
#include "cuda/cuda_device.h"
#endif
#include "sotto/sotto.h"
#include "transports/inproc/inproc_backend.h"
#if SOTTO_WITH_NCCL
#include "transports/nccl/nccl_backend.h"
#endif
#include "transports/nccl/params.h"
#include "transports/shm/shm_backend.h"
#include "transports/tcp/caps.h"
#include "transports/tcp/tcp_backend.h"
#include "transports/ucx/params.h"
#if SOTTO_WITH_UCX
#include "transports/ucx/ucx_backend.h"
#endif

namespace sotto::capi {
namespace {

constexpr uint32_t kDefaultMaxOps = 1024;

uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1u, static_cast<uint32_t>(CPU_COUNT(&set)));
}

// Ranks on this machine, as the launcher says; 1 if none does. Only a hint for the number of
// threads.
uint32_t local_ranks(const Params& params, const Environment& environment) {
  if (params.local_size > 0) return static_cast<uint32_t>(params.local_size);
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                           "SLURM_NTASKS_PER_NODE"}) {
    const std::optional<std::string> text = environment.get(name);
    uint32_t value = 0;
    if (text.has_value() &&
        std::from_chars(text->data(), text->data() + text->size(), value).ec == std::errc() &&
        value > 0) {
      return value;
    }
  }
  return 1;
}

uint32_t choose_threads(const Params& params, const Environment& environment, uint32_t asked) {
  if (asked != 0) return asked;
  if (params.cpu_threads > 0) return static_cast<uint32_t>(params.cpu_threads);
  return std::max(1u, usable_cores() / local_ranks(params, environment));
}

// What each row of core/base/transports.def brings. Its variables are read also where the build
// leaves the transport out (make is null): they are known then and have no effect.
BackendFactory bring_inproc(ParamReader&) {
  return {.make = [](const Params&) { return make_inproc_backend(Clock::monotonic()); }};
}
BackendFactory bring_tcp(ParamReader& reader) {
  const auto own = reader.read<tcp::Params>();
  return {
      .make = [own](const Params& common) { return make_tcp_backend(tcp_options(common, own)); },
      .alone_by = own.rate_limit_mbit > 0 ? "SOTTO_RATE_LIMIT_MBIT" : ""};  // of sockets
}
BackendFactory bring_shm(ParamReader& reader) {
  const auto own = reader.read<shm::Params>();
  return {
      .make = [own](const Params& common) { return make_shm_backend(shm_options(common, own)); }};
}
BackendFactory bring_nccl(ParamReader& reader) {
  const auto own = reader.read<nccl::Params>();
  BackendFactory brought;
#if SOTTO_WITH_NCCL
  brought.make = [own](const Params&) { return make_nccl_backend(nccl_options(own)); };
#endif
  return brought;
}

BackendFactory bring_ucx(ParamReader& reader) {
  const auto own = reader.read<ucx::Params>();
  BackendFactory brought;
#if SOTTO_WITH_UCX
  brought.make = [own](const Params& common) { return make_ucx_backend(ucx_options(common, own)); };
#endif
  return brought;
}

#if SOTTO_WITH_CUDA
constexpr char kCudaArchitectures[] = SOTTO_CUDA_ARCHITECTURES;
#else
constexpr char kCudaArchitectures[] = "";
Result<std::shared_ptr<Device>> make_cuda_device(int32_t index) {
  return unsupported("cuda:{}: this library was built without CUDA (SOTTO_WITH_CUDA=ON)", index);
}
std::vector<std::string> cuda_device_texts() {
  return {"no CUDA device: this library was built without CUDA (SOTTO_WITH_CUDA=ON)"};
}
#endif

Result<std::shared_ptr<Device>> make_device(const DeviceId& id) {
  if (id.type == DeviceType::kCuda) return make_cuda_device(id.index);
  return unsupported("there is no device {}", device_name(id));
}

std::string make_build_info() {
  using Json = nlohmann::ordered_json;
  Json info;
  info["version"] = SOTTO_VERSION;
  info["abi"] = fmt::format("{}.{}", SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR);
  info["devices"] = Json::array({"cpu"});
  if (*kCudaArchitectures != '\0') {
    info["devices"].push_back("cuda");
    info["cuda_architectures"] = kCudaArchitectures;
  }
  Json transports = Json::array();
  ParamReader defaults{Environment()};
  for (const auto& [name, factory] : all_backends(defaults)) transports.push_back(name);
  info["transports"] = transports;
  Json codecs = Json::array();
  for (const CodecRow& row : kCodecs) codecs.push_back(row.name());
  info["codecs"] = codecs;
  Json optimizers = Json::array();
  for (const OptimizerType& type : kOptimizerTypes) optimizers.push_back(type.name);
  info["optimizers"] = optimizers;
  info["dtypes"] = Json::array(
      {"int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "bf16", "fp32", "fp64"});
  info["simd"] = simd_levels_available();
  info["compiler"] = __VERSION__;
  info["build_type"] = SOTTO_BUILD_TYPE;
  if (*SOTTO_SANITIZE != '\0') info["sanitizers"] = SOTTO_SANITIZE;
  return dump_text(info);
}

}  // namespace

BackendFactories all_backends(ParamReader& reader) {
  BackendFactories backends;
#define SOTTO_TRANSPORT(name, ...)        \
  backends[#name] = bring_##name(reader); \
  backends[#name].transport = transport_row(#name);
#include "core/base/transports.def"
  std::erase_if(backends, [](const auto& entry) { return entry.second.make == nullptr; });
  return backends;
}

Result<std::shared_ptr<Device>> make_host_device(const Params& params,
                                                 const Environment& environment, uint32_t threads) {
  SOTTO_ASSIGN(const SimdLevel limit, simd_level_from_name(params.simd));
  SOTTO_ASSIGN(std::shared_ptr<Device> device,
               make_cpu_device(choose_threads(params, environment, threads), limit));
  return device;
}

TransportCaps network_caps(const Params& params) {
  TransportCaps caps = tcp::kCaps;
  if (params.segment_bytes != 0) caps.segment_bytes = static_cast<uint64_t>(params.segment_bytes);
  return caps;
}

Result<std::shared_ptr<Context>> make_context(ContextOptions options,
                                              const ContextChoices& choices) {
  SOTTO_ASSIGN(const SimdLevel limit, simd_level_from_name(options.params.simd));
  const uint32_t threads = choose_threads(options.params, options.environment, choices.cpu_threads);
  SOTTO_ASSIGN(std::unique_ptr<Device> device, make_cpu_device(threads, limit));
  options.device = std::move(device);
  options.device_text =
      fmt::format("cpu ({}, {} thread{})", simd_in_use(limit), threads, threads == 1 ? "" : "s");
  options.make_device = make_device;
  options.other_devices = cuda_device_texts;
  options.max_ops = choices.max_ops == 0 ? kDefaultMaxOps : choices.max_ops;
  options.progress_thread = choices.progress_thread;
  return std::make_shared<Context>(std::move(options));
}

const std::string& build_info() {
  static const std::string* const text = new std::string(make_build_info());  // never destroyed
  return *text;
}

}  // namespace sotto::capi
