// Gradients of an overlap on a rank's device, and what one all-reduce makes of the same values.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels/elements.h"
#include "core/overlap/overlap.h"
#include "tests/support/random_bits.h"
#include "tests/support/ranks.h"

namespace sotto::test {

template <class T>
T checked(Result<T> result) {
  if (!result.ok()) throw RankError(result.status().text());
  return result.take();
}
inline void checked(const Status& status) {
  if (!status.ok()) throw RankError(status.text());
}

using Values = std::vector<std::vector<std::byte>>;  // by gradient

inline std::vector<std::byte> converted(const std::vector<std::byte>& in, Dtype from, Dtype to) {
  std::vector<std::byte> out(in.size() / dtype_bytes(from) * dtype_bytes(to));
  for (size_t i = 0; i < in.size() / dtype_bytes(from); ++i) {
    float x = 0;
    uint16_t half = 0;
    if (from == Dtype::kF32) {
      std::memcpy(&x, &in[4 * i], 4);
    } else {
      std::memcpy(&half, &in[2 * i], 2);
      x = from == Dtype::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
    if (to == Dtype::kF32) {
      std::memcpy(&out[4 * i], &x, 4);
    } else {
      half = narrow(to, x);
      std::memcpy(&out[2 * i], &half, 2);
    }
  }
  return out;
}

class OverlapModel {
 public:
  struct Shape {
    uint64_t count;
    Dtype dtype;
  };
  static std::vector<Shape> mixed_shapes() {
    return {{20'001, Dtype::kF32}, {5, Dtype::kF16},     {0, Dtype::kF32},
            {3'000, Dtype::kBF16}, {9'333, Dtype::kF32}, {1, Dtype::kF32},
            {4'345, Dtype::kF16},  {2'048, Dtype::kF32}, {12'000, Dtype::kF32}};
  }
  static std::vector<Shape> floats(const std::vector<uint64_t>& counts) {
    std::vector<Shape> out;
    for (const uint64_t count : counts) out.push_back({count, Dtype::kF32});
    return out;
  }

  // moves: gradients have no memory that is known from the start.
  OverlapModel(const std::shared_ptr<Comm>& comm, const std::string& json,
               std::vector<Shape> shapes, bool moves = false)
      : comm_(comm),
        device_(comm->context()->device()),
        access_(comm->context()->engine(), device_),
        shapes_(std::move(shapes)),
        moves_(moves) {
    place_anew();
    std::vector<OverlapTensor> tensors;
    for (size_t t = 0; t < shapes_.size(); ++t)
      tensors.push_back({shapes_[t].count, shapes_[t].dtype, moves ? nullptr : memory_[t].data()});
    overlap_ = checked(Overlap::create(comm, json, std::move(tensors)));
  }
  ~OverlapModel() { overlap_->close(); }
  OverlapModel(const OverlapModel&) = delete;
  OverlapModel& operator=(const OverlapModel&) = delete;

  Overlap& overlap() { return *overlap_; }
  size_t size() const { return shapes_.size(); }
  uint64_t bytes(size_t t) const { return shapes_[t].count * dtype_bytes(shapes_[t].dtype); }

  // Gradients of a rank and a round: normal floats of all sizes.
  Values values(int32_t rank, uint64_t round) const {
    RandomBits random(static_cast<uint32_t>(rank) * 1000 + static_cast<uint32_t>(round));
    std::normal_distribution<float> normal;
    Values all = zeros();
    for (size_t t = 0; t < shapes_.size(); ++t) {
      for (uint64_t i = 0; i < shapes_[t].count; ++i) {
        const float x = normal(random);
        if (shapes_[t].dtype == Dtype::kF32) {
          std::memcpy(&all[t][4 * i], &x, 4);
        } else {
          const uint16_t half = narrow(shapes_[t].dtype, x);
          std::memcpy(&all[t][2 * i], &half, 2);
        }
      }
    }
    return all;
  }
  Values zeros() const {
    Values all(shapes_.size());
    for (size_t t = 0; t < shapes_.size(); ++t) all[t].resize(bytes(t));
    return all;
  }
  void place_anew() {
    std::vector<DeviceArray> memory;
    for (size_t t = 0; t < shapes_.size(); ++t)
      memory.push_back(checked(DeviceArray::make(device_, bytes(t))));
    std::swap(memory, memory_);
    before_ = std::move(memory);
  }
  void write(size_t t, const std::vector<std::byte>& values) {
    checked(access_.upload(memory_[t].data(), std::span<const std::byte>(values)));
  }
  Values read() const {
    Values all;
    for (size_t t = 0; t < shapes_.size(); ++t)
      all.push_back(checked(access_.download<std::byte>(memory_[t].data(), bytes(t))));
    return all;
  }

  OpRef begin(ReduceOp reduce = ReduceOp::kMean, const CallOptions& options = {}) {
    return checked(overlap_->begin(options, reduce));
  }
  // Gradients are computed, and ready.
  void ready(const Values& values, std::span<const uint64_t> indices) {
    std::vector<ParameterPlace> places;
    for (const uint64_t t : indices) {
      write(t, values[t]);
      places.push_back({memory_[t].data(), shapes_[t].count, shapes_[t].dtype, device_->caps().id});
    }
    if (!moves_) places.clear();
    checked(overlap_->ready(indices, places, std::nullopt));
  }
  Status wait(const OpRef& op) { return comm_->engine().wait(op, -1); }
  // What one all-reduce makes of values: of all gradients, in place.
  Values all_reduced(const Values& values, ReduceOp reduce) {
    std::vector<DeviceArray> memory;
    Call call;
    call.request.kind = OpKind::kAllReduce;
    call.request.reduce = reduce;
    call.request.rank = comm_->rank();
    call.request.size = comm_->size();
    for (size_t t = 0; t < shapes_.size(); ++t) {
      memory.push_back(checked(DeviceArray::make(device_, bytes(t))));
      checked(access_.upload(memory[t].data(), std::span<const std::byte>(values[t])));
      call.request.counts.push_back(shapes_[t].count);
      call.request.dtypes.push_back(shapes_[t].dtype);
      call.request.in_place.push_back(1);
      call.in.push_back(memory[t].data());
    }
    call.out = call.in;
    checked(comm_->run(std::move(call)));
    Values out;
    for (size_t t = 0; t < shapes_.size(); ++t)
      out.push_back(checked(access_.download<std::byte>(memory[t].data(), bytes(t))));
    return out;
  }

 private:
  std::shared_ptr<Comm> comm_;
  std::shared_ptr<Device> device_;
  DeviceAccess access_;
  std::vector<Shape> shapes_;
  const bool moves_;
  std::vector<DeviceArray> memory_, before_;
  std::shared_ptr<Overlap> overlap_;
};

inline void same_values(const Values& found, const Values& wanted, const std::string& what) {
  for (size_t t = 0; t < wanted.size(); ++t) {
    if (found[t] != wanted[t])
      throw RankError(what + ": gradient " + std::to_string(t) + " differs");
  }
}

}  // namespace sotto::test
