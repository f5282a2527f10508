#include "transports/nccl/nccl_backend.h"

#include <utility>

#include "core/base/text.h"
#include "transports/nccl/communicator.h"
#include "transports/nccl/nccl_transport.h"
#include "transports/nccl/poller.h"

namespace sotto {
namespace nccl {
namespace {

class NcclBackend final : public Backend {
 public:
  explicit NcclBackend(NcclOptions options) : options_(std::move(options)) {}

  const char* name() const override { return "nccl"; }
  Poller& poller() override { return *poller_; }
  Status adopt(void* native_comm) override {
    adopted_ = static_cast<ncclComm_t>(native_comm);
    return ok_status();
  }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    if (peers.all.size() != static_cast<size_t>(control.size())) {
      return unsupported("nccl: a communicator of {}, not of {}", counted(control.size(), "rank"),
                         peers.all.size());
    }
    SOTTO_ASSIGN(
        std::unique_ptr<Communicator> communicator,
        Communicator::make(options_, std::exchange(adopted_, nullptr), control, driver, deadline));
    SOTTO_ASSIGN(std::unique_ptr<NcclTransport> transport,
                 NcclTransport::make(std::move(communicator), poller_, control, sink, driver,
                                     deadline, options_));
    return std::unique_ptr<Transport>(std::move(transport));
  }

 private:
  const NcclOptions options_;
  const std::shared_ptr<NcclPoller> poller_ = std::make_shared<NcclPoller>();
  ncclComm_t adopted_ = nullptr;  // for the next connect
};

}  // namespace
}  // namespace nccl

NcclOptions nccl_options(const nccl::Params& params) {
  NativeCollectives native = 0;
  if (params.nccl_native != "off") native = kNativeMoves | kNativeIntegers;
  if (params.nccl_native == "all") native |= kNativeFloats;
  return {.library = params.nccl_library, .native = native};
}

Result<std::unique_ptr<Backend>> make_nccl_backend(const NcclOptions& options) {
  return std::unique_ptr<Backend>(std::make_unique<nccl::NcclBackend>(options));
}

}  // namespace sotto
