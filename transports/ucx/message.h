// What one active message carries beside the payload of its frame.
#pragma once

#include <cstdint>
#include <memory>

#include "core/wire/frame.h"

namespace sotto::ucx {

inline constexpr unsigned kMessageId = 1;  // of the active messages

// The header of the active message, as it lies in memory: UCX connects hosts of one byte order.
struct Head {
  uint64_t to = 0;      // the receiving end, as its process has numbered it
  uint64_t number = 0;  // of the frame on its carrier, from 0
  wire::HeaderBytes frame{};
  wire::TrailerBytes trailer{};  // zeros without a payload
};
// Instead of a number, without a frame: all frames up to the bye have arrived.
inline constexpr uint64_t kTaken = UINT64_MAX;

// Of a pair of ranks, over one endpoint. The first is for small messages, the others for as many
// long ones as may be under way.
inline constexpr uint64_t kCarriers = 4;

// The number of a carrier for a rank, on the worker of another; kCarriers: of the endpoint, whose
// messages are greetings.
constexpr uint64_t number_for(int32_t rank, uint64_t carrier) {
  return static_cast<uint64_t>(rank) * (kCarriers + 1) + carrier;
}

struct Arrived {
  Head head;
  void* data = nullptr;  // null: no payload
  uint64_t bytes = 0;
  bool rendezvous = false;         // data has to be fetched from the sender
  bool held = false;               // data is UCX's, until it is received or released
  std::unique_ptr<uint8_t[]> own;  // where data is, if it was copied
};

}  // namespace sotto::ucx
