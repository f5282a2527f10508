// What tests of transports hand over, and a sink that keeps what comes back.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::test {

class RecordingSink final : public TransferSink {
 public:
  struct Done {
    Transfer* transfer;
    Status status;
  };
  struct ReportedFailure {
    int32_t peer;
    Status status;
  };
  void on_transfer(Transfer& transfer, Status status) noexcept override {
    done.push_back({&transfer, status});
  }
  void on_failure(int32_t peer, Status status) noexcept override {
    failures.push_back({peer, status});
  }
  std::vector<Done> done;
  std::vector<ReportedFailure> failures;
};

// One operation of one rank with its transfers. Addresses stay as they are.
struct TestOp {
  OpDescriptor descriptor;
  std::deque<Transfer> transfers;

  TestOp(uint64_t comm, uint64_t number, uint64_t tag = 0) {
    descriptor.key = {comm, number};
    descriptor.signature.kind = OpKind::kAllReduce;
    descriptor.signature.reduce = 1;
    descriptor.signature.count = 100;
    descriptor.signature.tag = tag;
    descriptor.signature.chain = number * 77 + tag;
  }
  Transfer& add(bool is_send, int32_t peer, uint32_t round, uint32_t segment, void* data,
                uint64_t bytes) {
    Transfer& t = transfers.emplace_back();
    t.op = &descriptor;
    t.peer = peer;
    t.round = round;
    t.segment = segment;
    t.is_send = is_send;
    t.data = data;
    t.bytes = bytes;
    return t;
  }
};

}  // namespace sotto::test
