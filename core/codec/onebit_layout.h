// How the tensors of one compressed call lie in its flat space (specification 1.1, 1.4, 1.10).
//
// A compression instance is what has scales of its own: everything together (`flat`) or each tensor
// (`tensor`). Instance i with n_i elements has chunks of K_i = align * ceil(n_i / (align * W))
// elements, one per rank. The flat space is ordered by destination, so that what one rank receives
// is contiguous: chunk 0 of all instances, chunk 1 of all instances, ... With one instance it is
// the concatenation of the tensors followed by padding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/iface/kernels.h"

namespace sotto {

enum class OnebitGranularity : uint8_t { kFlat = 1, kTensor = 2 };

struct OnebitTensor {
  uint64_t count = 0;
  uint32_t group = 0;
};

// A run of flat elements handed to one kernel and sent as one message.
struct OnebitSegment {
  uint64_t begin = 0;  // flat
  uint64_t count = 0;  // a multiple of 8
};

class OnebitLayout {
 public:
  // align: a positive multiple of 8.
  OnebitLayout(std::vector<OnebitTensor> tensors, uint32_t ranks, uint64_t align,
               OnebitGranularity granularity);

  uint32_t ranks() const { return ranks_; }
  uint64_t instances() const { return instances_.size(); }
  uint64_t elements() const { return elements_; }     // real elements of all tensors
  uint64_t chunk_elements() const { return chunk_; }  // of all instances, per rank
  uint64_t flat_elements() const { return chunk_ * ranks_; }
  const std::vector<OnebitTensor>& tensors() const { return tensors_; }

  // Cuts chunk k into runs of about `elements`; cuts lie where norm blocks start.
  std::vector<OnebitSegment> segments(uint32_t chunk, uint64_t elements) const;
  // Pieces of a segment of chunk k, padding included, for the worker side: flat indices, worker
  // norm blocks.
  std::vector<Piece> worker_pieces(uint32_t chunk, const OnebitSegment& segment) const;
  // The same for the server side: flat counts from the start of the chunk, server norm blocks of
  // this chunk.
  std::vector<Piece> server_pieces(uint32_t chunk, const OnebitSegment& segment) const;
  // Pieces of one tensor in its own order; norm blocks count from the tensor's start, first
  // tensor_range(t).first_block.
  std::vector<Piece> tensor_pieces(uint32_t tensor) const;

  // Norm ranges: worker scale of every instance, server scale of every instance in chunk k, norm of
  // every tensor.
  std::vector<NormRange> worker_ranges() const;
  std::vector<NormRange> server_ranges(uint32_t chunk) const;
  std::vector<NormRange> tensor_ranges() const;
  uint64_t worker_blocks() const { return worker_blocks_; }
  uint64_t server_blocks() const { return server_blocks_; }
  uint64_t tensor_blocks() const { return tensor_blocks_; }

 private:
  struct Instance {
    uint64_t count = 0;        // n_i
    uint64_t chunk = 0;        // K_i
    uint64_t chunk_begin = 0;  // within a rank's chunk of the flat space
    uint64_t worker_first_block = 0;
    uint64_t server_first_block = 0;  // within a chunk's blocks
    std::vector<uint32_t> tensors;
    std::vector<uint64_t> starts;  // of each tensor within the instance
  };

  uint64_t valid(const Instance& instance, uint32_t chunk) const;
  size_t instance_at(uint64_t within_chunk) const;
  void append_pieces(uint32_t chunk, const OnebitSegment& segment, bool server,
                     std::vector<Piece>* out) const;

  std::vector<OnebitTensor> tensors_;
  std::vector<Instance> instances_;
  std::vector<uint32_t> instance_of_;     // per tensor
  std::vector<uint64_t> start_of_;        // per tensor: start within its instance
  std::vector<uint64_t> first_block_of_;  // per tensor
  uint32_t ranks_;
  uint64_t elements_ = 0;
  uint64_t chunk_ = 0;
  uint64_t worker_blocks_ = 0, server_blocks_ = 0, tensor_blocks_ = 0;
};

}  // namespace sotto
