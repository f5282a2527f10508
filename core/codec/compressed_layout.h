// How the tensors of one compressed call lie in its flat space (specification 1.1, 1.4, 1.10).
//
// The tensors, by parameter group and then in the order of registration, are one sequence of
// elements; tensors without elements take no part, nor do those that are never compressed, which
// lie behind the chunks. A compression instance is a range of it that has scales of its own.
// Instance i with n_i elements has chunks of K_i = align * ceil(n_i / (align * W)) elements, one
// for each of W servers. Or chunks have whole blocks of tensors, which begin at multiples of
// tensor_align in them: of B blocks chunk k has those from floor(k B / W) to floor((k + 1) B / W) -
// 1, and K is the length of the longest one (specification sparse-loco, 6.2).
//
// In one level every rank is a server. In two (plan/levels.h), a shard has as many servers as there
// are hosts: one on each, which compress that shard with each other. Servers are numbered shard by
// shard, and in each host by host.
//
// A section is a run of instances with rounds and scale messages of its own, so that one can be
// encoded while another travels. The flat space has shard after shard, and in each section after
// section; inside a section it is ordered by destination, so that what one server receives is
// contiguous: chunk 0 of all instances, chunk 1 of all instances, ... With one shard, one section
// and one instance it is the sequence followed by padding.
//
// Padding normally is no data: nothing reads it. Where it is (`padding_group`), every instance ends
// with a tensor of its own that fills its last chunks; these tensors have the numbers after the
// registered ones and appear in pieces, but in no norm, average or update of tensors.
//
// Scale messages of all servers (the message area) lie section after section, in each one message
// per server. A server's flat space has its own chunk of every section.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/codec.h"
#include "core/codec/tensor_sequence.h"
#include "core/kernels/call.h"

namespace sotto {

struct LayoutSection {
  uint64_t first_instance = 0;
  uint64_t instances = 0;
  uint64_t flat_begin = 0;      // in a shard's part of the flat space
  uint64_t chunk = 0;           // elements of all its instances per server
  uint64_t server_begin = 0;    // in a server's flat space
  uint64_t message_offset = 0;  // bytes, in the message area
  uint64_t message_bytes = 0;   // of one rank's message
};

// A run of flat elements handed to one kernel and sent as one message.
struct LayoutSegment {
  uint64_t begin = 0;  // flat
  uint64_t count = 0;  // a multiple of 8
  uint32_t section = 0;
};

class CompressedLayout {
 public:
  // servers: of all shards, a multiple of `shards`. align: a positive multiple of 8. bucket:
  // elements, for kBucket. scales: scale messages have scales; else flags only. padding_group:
  // padding is data of this group; not with kBucket. tensor_align: 1: chunks are equally long;
  // else elements, with kFlat, one shard and padding that is no data.
  CompressedLayout(std::vector<LayoutTensor> tensors, uint32_t servers, uint64_t align,
                   Granularity granularity, uint64_t bucket = 0, bool scales = true,
                   std::optional<uint32_t> padding_group = std::nullopt, uint32_t shards = 1,
                   uint64_t tensor_align = 1);
  // For a codec.
  static CompressedLayout of(const CodecSettings& codec, std::vector<LayoutTensor> tensors,
                             uint32_t servers, uint32_t shards,
                             std::optional<uint32_t> padding_group = std::nullopt);

  uint32_t servers() const { return servers_; }
  uint32_t servers_per_shard() const { return per_shard_; }
  uint64_t shard_elements() const { return chunk_ * per_shard_; }
  uint64_t instances() const { return instances_.size(); }
  uint64_t elements() const { return sequence_.elements(); }  // real elements of all tensors
  uint64_t chunk_elements() const { return chunk_; }          // of all instances, per server
  uint64_t compressed_elements() const { return chunk_ * servers_; }
  uint64_t flat_elements() const { return compressed_elements() + sequence_.uncompressed(); }
  const std::vector<LayoutTensor>& tensors() const { return sequence_.tensors(); }
  // Padding that is data: tensor tensors().size() + i. Empty if padding is no data.
  const std::vector<LayoutTensor>& padding() const { return sequence_.padding(); }
  // Of a tensor or of padding.
  bool compressed(uint32_t tensor) const { return sequence_[tensor].compressed; }
  uint64_t elements_with_padding() const { return sequence_.elements_with_padding(); }
  const std::vector<LayoutSection>& sections() const { return sections_; }
  uint64_t message_bytes() const { return message_bytes_; }  // of the message area
  // Servers whose messages carry a flag, ascending. area: message_bytes() bytes.
  std::vector<uint32_t> flagged(std::span<const std::byte> area) const;
  // First flat element of chunk k of a section, and how many it has.
  uint64_t chunk_begin(const LayoutSection& s, uint32_t chunk) const {
    if (!ends_.empty()) return chunk == 0 ? 0 : ends_[chunk - 1];
    return chunk / per_shard_ * shard_elements() + s.flat_begin + chunk % per_shard_ * s.chunk;
  }
  uint64_t chunk_count(const LayoutSection& s, uint32_t chunk) const {
    return ends_.empty() ? s.chunk : ends_[chunk] - chunk_begin(s, chunk);
  }

  // Cuts chunk k of a section into runs of about `elements`; cuts lie where norm blocks start.
  std::vector<LayoutSegment> segments(uint32_t section, uint32_t chunk, uint64_t elements) const;
  // Pieces of a segment of chunk k, padding included, for the worker side: flat indices, worker
  // norm blocks.
  std::vector<Piece> worker_pieces(uint32_t chunk, const LayoutSegment& segment) const;
  // The same for the server side: flat counts in the server's own flat space, norm blocks are this
  // chunk's, `message` is the index of the scale inside one message of the section.
  std::vector<Piece> server_pieces(uint32_t chunk, const LayoutSegment& segment) const;
  // Pieces of one tensor (or padding) in its own order; norm blocks count from the tensor's start,
  // first tensor_range(t).first_block.
  std::vector<Piece> tensor_pieces(uint32_t tensor) const;

  // Norm ranges: worker scale of every instance in a shard, server scale of every instance in chunk
  // k, norm of every tensor.
  std::vector<NormRange> worker_ranges(uint32_t shard) const;
  std::vector<NormRange> server_ranges(uint32_t chunk) const;
  std::vector<NormRange> tensor_ranges() const;
  uint64_t worker_blocks() const { return worker_blocks_; }
  uint64_t server_blocks() const { return server_blocks_; }
  uint64_t tensor_blocks() const { return sequence_.blocks(); }

 private:
  struct Instance {
    uint64_t begin = 0;  // in the sequence of all elements
    uint64_t count = 0;  // n_i
    uint32_t section = 0;
    uint64_t chunk = 0;        // K_i
    uint64_t chunk_begin = 0;  // within its section's chunk
    uint64_t worker_first_block = 0;
    uint64_t server_first_block = 0;  // within a chunk's blocks
  };
  void cut_instances(Granularity granularity, uint64_t bucket);
  std::vector<Piece> uncompressed_pieces(uint32_t tensor) const;
  void append_padding(uint64_t unit, uint32_t group);
  void place_instances(uint64_t align, bool sections, bool scales);
  // Where a chunk begins in the instance, its elements with and without padding, and the chunk that
  // has an element.
  uint64_t begin(const Instance& instance, uint32_t chunk) const;
  uint64_t length(const Instance& instance, uint32_t chunk) const;
  uint64_t valid(const Instance& instance, uint32_t chunk) const;
  uint32_t chunk_of(const Instance& instance, uint64_t element) const;
  // Index of the instance of a section that holds an element of its chunk.
  size_t instance_at(const LayoutSection& section, uint64_t within_chunk) const;
  uint32_t message_word(const Instance& instance, size_t index, uint32_t chunk) const;
  void append_pieces(uint32_t chunk, const LayoutSegment& segment, bool server,
                     std::vector<Piece>* out) const;

  TensorSequence sequence_;
  std::vector<Instance> instances_;
  std::vector<LayoutSection> sections_;
  uint32_t servers_, per_shard_;
  uint64_t chunk_ = 0;
  uint64_t message_bytes_ = 0;
  uint64_t worker_blocks_ = 0, server_blocks_ = 0;
  std::vector<uint64_t> ends_;  // of chunks between blocks, flat; else empty
};

// Whole chunk k of every section, for the worker and for the server side.
std::vector<Piece> worker_chunk(const CompressedLayout& layout, uint32_t chunk);
std::vector<Piece> server_chunk(const CompressedLayout& layout, uint32_t chunk);

}  // namespace sotto
