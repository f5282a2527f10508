// The memory of one error-compensated compressor on one rank: worker and server residual, and for
// codecs with scales counts of valid elements and two buffers for the bits and scales of a result,
// so that an optimizer can keep its momentum in one while the next arrives in the other. Their
// residuals are in the deferred form (what was encoded and its scale). The server's has two buffers
// as well: what a step makes of it counts only when the step commits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/codec/compressed.h"
#include "core/codec/compressed_layout.h"
#include "core/codec/tensor_runs.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"

namespace sotto {

// Error feedback of one rank, on the host.
struct ErrorFeedback {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t chunk_align = 0;
  std::string granularity;       // "flat", "group", "tensor" or "bucket"
  uint64_t bucket_elements = 0;  // "bucket"
  std::string scale;             // what this is the error of: Coding::state_name
  std::string hierarchy;         // empty: one level; else kind and every rank's host
  std::vector<float> worker;     // e of every element of the own shard, the tensors one after the
                                 // other, then padding that is data
  std::vector<float> server;     // e of the own chunk, in the chunk's order
};

// Error feedback of all ranks in the order of the tensors, one after the other: what it adds to the
// future results does not depend on the number of ranks (specification, I5 and section 12).
struct MeanErrorFeedback {
  std::vector<float> worker;  // mean over the workers of a shard of their errors
  std::vector<float> server;  // errors of the servers
};

class CompressedState {
 public:
  CompressedState() = default;
  // The layout must outlive the state. Residuals are 0; counts are those of an unmasked layout.
  // levels: of the comm's ranks; null: one level. at_launch: there is memory for the worker's error
  // of before an operation under way.
  static Result<CompressedState> make(const Comm& comm, const DeviceAccess& access,
                                      const CompressedLayout& layout, const CodecSettings& settings,
                                      const Levels* levels = nullptr, bool at_launch = false);

  // What bytes() of such a state is, in one level.
  static uint64_t bytes_of(const CompressedLayout& layout, const CodecSettings& settings,
                           bool at_launch = false);

  // Binds the slots; the result and the new server residual go to the buffers that are not current.
  void bind(Run& run, const CompressedSlots& slots) const { bind(run, slots, current_); }
  // The same for an operation that begins when buffers `current` will be current, 0 or 1.
  void bind(Run& run, const CompressedSlots& slots, int current) const;
  int current() const { return current_; }
  void bind_current(Run& run, uint32_t bits_slot, uint32_t messages_slot) const;
  // What was bound as next becomes current: after a step that has committed, and only then.
  void flip() { current_ = 1 - current_; }
  const DeviceArray& current_bits() const { return bits_[current_]; }
  const DeviceArray& current_messages() const { return messages_[current_]; }

  // Counts of valid elements, from the valid bits (all 1: no mask).
  Status set_counts(const std::vector<uint8_t>& valid_bits);

  // This rank and its settings, without values.
  ErrorFeedback no_errors() const;
  // Values that an ErrorFeedback of this rank has.
  uint64_t worker_values() const;
  uint64_t server_values() const;
  // INVALID_ARGUMENT if it does not fit this rank and these settings; its values are not looked at.
  // has_mean: the owner's states have a mode mean, to advise.
  Status check_settings(const ErrorFeedback& residual, uint64_t worker_values,
                        uint64_t server_values, bool has_mean = true) const;

  // Errors in the order of an ErrorFeedback, a bounded number at a time. valid_bits: empty if
  // nothing is masked; masked elements have no error.
  Status worker_errors(const std::vector<uint8_t>& valid_bits, const FloatSink& sink) const;
  Status server_errors(const std::vector<uint8_t>& valid_bits, const FloatSink& sink) const;
  // In the order of a MeanErrorFeedback: collectives of `comm`, 4 bytes per element each. Zeros if
  // there is no residual.
  Status mean_worker_errors(Comm& comm, const std::vector<uint8_t>& valid_bits,
                            const FloatSink& sink) const;
  Status mean_server_errors(Comm& comm, const std::vector<uint8_t>& valid_bits,
                            const FloatSink& sink) const;

  // All errors become 0; then they are put in, in the same orders (with those of padding, or
  // without).
  Status clear_errors();
  Status put_worker_errors(const FloatSource& source, bool padding);
  Status put_server_errors(const FloatSource& source);
  // Of all ranks: keeps those of its own chunk.
  Status put_mean_server_errors(const FloatSource& source);

  // The same on vectors. at_launch: the worker's error of before the operation under way.
  Result<ErrorFeedback> residual(const std::vector<uint8_t>& valid_bits,
                                 bool at_launch = false) const;
  Status check(const ErrorFeedback& residual, bool has_mean = true) const;
  Status restore(const ErrorFeedback* residual);  // null: zero. Also what there is at_launch
  Result<MeanErrorFeedback> mean(Comm& comm, const std::vector<uint8_t>& valid_bits) const;
  // INVALID_ARGUMENT: other sizes, values that are not finite, or no residual to restore.
  Status restore_mean(const MeanErrorFeedback& mean);

  uint64_t bytes() const;

 private:
  // Of this rank.
  struct Place {
    int32_t rank = 0, size = 1;
    uint32_t server = 0;    // number among servers
    bool serves = true;     // it has a shard
    std::string hierarchy;  // ErrorFeedback::hierarchy
    float per_host = 1;     // ranks of a host
  };

  // visit(array, bytes) for every array that the settings call for, until one fails.
  template <class Visit>
  Status for_each_array(const CompressedLayout& layout, Visit&& visit);
  // worker: the own shard's.
  Status worker_run(const DeviceArray& worker, const TensorRun& run,
                    const std::vector<float>& scales, const std::vector<uint8_t>& valid_bits,
                    float* out) const;
  Status errors_of(const DeviceArray& worker, const DeviceArray& scale,
                   const std::vector<uint8_t>& valid_bits, const FloatSink& sink) const;
  Result<std::vector<float>> scales_of(const DeviceArray& scales) const;
  // Where an element of the own chunk is in the server's flat space.
  uint64_t server_position(uint64_t flat) const;
  bool has_scales() const { return settings_.row().scales; }
  bool serves(const Piece& piece) const { return place_.serves && piece.chunk == place_.server; }
  // In the own shard.
  bool works_on(const Piece& piece) const {
    return place_.serves && piece.chunk / layout_->servers_per_shard() == shard();
  }
  uint32_t shard() const { return place_.server / layout_->servers_per_shard(); }
  uint64_t shard_begin() const { return shard() * layout_->shard_elements(); }

  DeviceAccess access_;
  const CompressedLayout* layout_ = nullptr;
  CodecSettings settings_;
  Place place_;
  bool at_launch_ = false;
  DeviceArray worker_, worker_scale_, worker_counts_, server_counts_;
  DeviceArray launch_worker_, launch_scale_;  // of before an operation under way
  DeviceArray server_error_[2], server_scale_[2];
  DeviceArray bits_[2], messages_[2];
  int current_ = 0;
};

}  // namespace sotto
