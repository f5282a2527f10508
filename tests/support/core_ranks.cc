#include "tests/support/core_ranks.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "core/base/transports.h"
#include "core/cpu/cpu_device.h"
#include "tests/emulation/async_device/async_device.h"
#include "tests/support/ordered_transport.h"
#include "transports/inproc/inproc_backend.h"
#include "transports/shm/shm_backend.h"
#include "transports/tcp/tcp_backend.h"
#if SOTTO_TEST_UCX
#include "transports/ucx/ucx_backend.h"
#endif

namespace sotto::test {

namespace {

// Around any backend: where the rank is, is the test's to say.
class PlacedBackend final : public Backend {
 public:
  PlacedBackend(std::unique_ptr<Backend> base, uint64_t place)
      : base_(std::move(base)), place_(place) {}
  const char* name() const override { return base_->name(); }
  Poller& poller() override { return base_->poller(); }
  Result<UniqueId> make_unique_id(Reach reach) override { return base_->make_unique_id(reach); }
  bool knows(const UniqueId& id) const override { return base_->knows(id); }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override {
    return base_->join(request, driver);
  }
  uint64_t place() const override { return place_; }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    return base_->connect(control, peers, sink, driver, deadline);
  }

 private:
  const std::unique_ptr<Backend> base_;
  const uint64_t place_;
};

constexpr TransportCaps kCut{.name = "ordered"};
// As NCCL has them, with windows so small that there are many, and large ones.
constexpr TransportCaps kWhole{
    .name = "ordered", .segment_bytes = 0, .held = {.count = 1, .bytes = 128 * 1024}};
constexpr TransportCaps kWholeLarge{
    .name = "ordered", .segment_bytes = 0, .held = {.count = 1, .bytes = 64 << 20}};

template <const TransportCaps& kCaps>
Result<std::unique_ptr<Backend>> make_ordered(const Params&) {
  SOTTO_ASSIGN(std::unique_ptr<Backend> base, make_inproc_backend(Clock::monotonic()));
  return make_ordered_backend(std::move(base), 7, kCaps);
}

}  // namespace

std::function<Result<std::unique_ptr<Backend>>(const Params&)> placed(
    std::function<Result<std::unique_ptr<Backend>>(const Params&)> make, uint64_t place) {
  return [make = std::move(make), place](const Params& params) -> Result<std::unique_ptr<Backend>> {
    SOTTO_ASSIGN(std::unique_ptr<Backend> base, make(params));
    return std::unique_ptr<Backend>(std::make_unique<PlacedBackend>(std::move(base), place));
  };
}

BackendFactories standard_backends(const tcp::Params& own) {
  BackendFactories backends;
  backends["inproc"] = {[](const Params&) { return make_inproc_backend(Clock::monotonic()); },
                        transport_row("inproc")};
  backends["shm"] = {
      [](const Params& common) { return make_shm_backend(shm_options(common, shm::Params())); },
      transport_row("shm")};
  backends["tcp"] = {
      [own](const Params& common) { return make_tcp_backend(tcp_options(common, own)); },
      transport_row("tcp")};
#if SOTTO_TEST_UCX
  backends["ucx"] = {[](const Params& common) {
                       ::setenv("UCX_TLS", "tcp", 0);  // what goes between hosts
                       const Environment environment = process_environment();
                       ParamReader reader(environment);
                       return make_ucx_backend(ucx_options(common, reader.read<ucx::Params>()));
                     },
                     transport_row("ucx")};
#endif
  return backends;
}

std::vector<std::string> world_kinds() {
  std::vector<std::string> kinds = {"inproc",        "tcp",     "shm",           "async",
                                    "device_memory", "ordered", "ordered_async", "mixed"};
#if SOTTO_TEST_UCX
  kinds.push_back("ucx");
#endif
  if (add_cuda_world != nullptr) kinds.push_back("cuda");
  return kinds;
}

WorldOptions world_of(const std::string& kind, int32_t size) {
  WorldOptions world;
  world.size = size;
  if (std::ranges::count(kTransportChoices, kind) != 0) world.transport = kind;
  if (kind == "ucx") {  // each rank on a host of its own
    world.rank_params = [](int32_t rank, Params* params) {
      params->host_id = fmt::format("host {}", rank);
    };
  }
  if (kind == "cuda") add_cuda_world(&world);
  if (kind == "async" || kind == "device_memory" || kind == "ordered_async" || kind == "mixed") {
    world.device = [kind](int32_t rank) -> std::shared_ptr<Device> {
      AsyncDeviceOptions options;
      options.seed = static_cast<uint64_t>(rank) + 1;
      options.host_memory = kind != "device_memory";
      options.split_elements = 4 * kNormBlock;
      options.max_delay_us = 20;
      return std::make_shared<AsyncDevice>(options);
    };
  }
  if (kind == "ordered" || kind == "ordered_async") {
    const auto make = kind == "ordered" ? make_ordered<kCut> : make_ordered<kWhole>;
    world.transport = "ordered";
    world.backends["ordered"] = {make, transport_row("ordered")};
  }
  if (kind == "mixed") {
    world.transport = kAutoTransport;
    world.wrap_backends = [](int32_t rank, BackendFactories* backends) {
      backends->at("inproc").make =
          placed(make_ordered<kWholeLarge>, static_cast<uint64_t>(rank) % 2 + 1);
    };
  }
  return world;
}

namespace {

std::shared_ptr<Context> make_context(const WorldOptions& options, int32_t rank) {
  ContextOptions context;
  context.params = options.params;
  context.params.transport = options.transport;
  if (options.rank_params) options.rank_params(rank, &context.params);
  context.environment = process_environment();
  context.device =
      options.device ? options.device(rank) : std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  context.device_text = "test";
  context.backends = options.backends.empty() ? standard_backends(options.tcp) : options.backends;
  if (options.wrap_backends) options.wrap_backends(rank, &context.backends);
  context.progress_thread = options.progress_thread;
  context.clock = options.clock;
  return std::make_shared<Context>(std::move(context));
}

}  // namespace

Status run_world(const WorldOptions& options,
                 const std::function<Status(const std::shared_ptr<Comm>&)>& body) {
  std::vector<std::shared_ptr<Context>> contexts;
  for (int32_t r = 0; r < options.size; ++r) contexts.push_back(make_context(options, r));
  SOTTO_ASSIGN(const UniqueId id, contexts[0]->make_unique_id());
  std::vector<Status> results(static_cast<size_t>(options.size));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < options.size; ++r) {
    threads.emplace_back([&, r] {
      if (options.on_rank_thread) options.on_rank_thread();
      CommConfig config;
      config.rank = r;
      config.size = options.size;
      config.id = id;
      config.timeout_us = options.timeout_us;
      Result<std::shared_ptr<Comm>> comm = Comm::create(contexts[static_cast<size_t>(r)], config);
      results[static_cast<size_t>(r)] = comm.ok() ? body(*comm) : comm.status();
    });
  }
  for (std::thread& t : threads) t.join();
  for (int32_t r = 0; r < options.size; ++r) {
    const Status& status = results[static_cast<size_t>(r)];
    if (!status.ok()) return status.with_prefix(fmt::format("rank {}", r));
  }
  return ok_status();
}

}  // namespace sotto::test
