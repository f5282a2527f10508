#include "tests/support/process_comm.h"

#include <utility>

#include "core/cpu/cpu_device.h"
#include "tests/support/core_ranks.h"
#include "tests/support/kill_campaign.h"

namespace sotto::test {

Result<std::shared_ptr<Comm>> create_by_file(const ProcessRank& self, const Params& params,
                                             int64_t timeout_us, const std::string& id_file) {
  ContextOptions options;
  options.params = params;
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends();
  const auto context = std::make_shared<Context>(std::move(options));
  CommConfig config;
  config.rank = self.rank;
  config.size = self.size;
  config.timeout_us = timeout_us;
  UniqueId id{};
  if (self.rank == 0) {
    SOTTO_ASSIGN(id, context->make_unique_id());
    publish(id_file, id.data(), id.size());
  } else if (!await_published(id_file, id.data(), id.size(), 60'000)) {
    return error(Code::kTimeout, "no id");
  }
  config.id = id;
  return Comm::create(context, config);
}

}  // namespace sotto::test
