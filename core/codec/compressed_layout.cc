#include "core/codec/compressed_layout.h"

#include <algorithm>
#include <cstring>

#include "core/base/shares.h"

namespace sotto {
namespace {

uint64_t blocks_of(uint64_t elements) { return (elements + kNormBlock - 1) / kNormBlock; }

// Where chunks end that have whole blocks; nothing if there are no blocks.
std::vector<uint64_t> chunk_ends(const TensorSequence& sequence, uint32_t servers, uint64_t block) {
  const auto blocks_of_tensor = [&](const TensorSequence::Span& span) {
    return (sequence[span.tensor].count + block - 1) / block;
  };
  uint64_t blocks = 0;
  for (const TensorSequence::Span& span : sequence.spans()) blocks += blocks_of_tensor(span);
  std::vector<uint64_t> ends;
  if (blocks == 0) return ends;
  auto span = sequence.spans().begin();
  uint64_t before = 0;  // blocks of the tensors before
  for (uint32_t k = 1; k < servers; ++k) {
    const uint64_t first = share_begin(blocks, k, servers);
    while (first >= before + blocks_of_tensor(*span)) before += blocks_of_tensor(*span++);
    ends.push_back(span->begin + (first - before) * block);
  }
  ends.push_back(sequence.length());
  return ends;
}

}  // namespace

CompressedLayout::CompressedLayout(std::vector<LayoutTensor> tensors, uint32_t servers,
                                   uint64_t align, Granularity granularity, uint64_t bucket,
                                   bool scales, std::optional<uint32_t> padding_group,
                                   uint32_t shards, uint64_t tensor_align)
    : sequence_(std::move(tensors)), servers_(servers), per_shard_(servers / shards) {
  cut_instances(granularity, bucket);
  if (padding_group) append_padding(align * servers, *padding_group);
  place_instances(align, granularity == Granularity::kBucket, scales);
  if (tensor_align == 1 || servers == 1) return;
  ends_ = chunk_ends(sequence_, servers, tensor_align);
  if (ends_.empty()) return;
  uint64_t longest = 0;
  for (uint32_t k = 0; k < servers; ++k)
    longest = std::max(longest, chunk_count(sections_.front(), k));
  chunk_ = sections_.front().chunk = instances_.front().chunk = (longest + 7) / 8 * 8;
  server_blocks_ = blocks_of(chunk_);
  worker_blocks_ = server_blocks_ * servers;
}

CompressedLayout CompressedLayout::of(const CodecSettings& codec, std::vector<LayoutTensor> tensors,
                                      uint32_t servers, uint32_t shards,
                                      std::optional<uint32_t> padding_group) {
  return CompressedLayout(std::move(tensors), servers, codec.chunk_align, codec.granularity,
                          codec.bucket_elements, codec.row().scales, padding_group, shards,
                          codec.tensor_align());
}

void CompressedLayout::cut_instances(Granularity granularity, uint64_t bucket) {
  const auto add = [this](uint64_t begin, uint64_t end) {
    instances_.emplace_back();
    instances_.back().begin = begin;
    instances_.back().count = end - begin;
  };
  const uint64_t length = sequence_.length();
  if (granularity == Granularity::kFlat) bucket = length;
  if (granularity == Granularity::kFlat || granularity == Granularity::kBucket) {
    for (uint64_t at = 0; at < length; at += bucket) add(at, std::min(length, at + bucket));
    return;
  }
  const std::vector<TensorSequence::Span>& spans = sequence_.spans();
  for (size_t i = 0; i < spans.size(); ++i) {
    const LayoutTensor& tensor = sequence_[spans[i].tensor];
    const bool joins = granularity == Granularity::kGroup && i > 0 &&
                       sequence_[spans[i - 1].tensor].group == tensor.group;
    if (joins) {
      instances_.back().count += tensor.count;
    } else {
      add(spans[i].begin, spans[i].begin + tensor.count);
    }
  }
}

// Makes every instance a multiple of `unit` elements long. No tensor lies in two instances.
void CompressedLayout::append_padding(uint64_t unit, uint32_t group) {
  std::vector<uint64_t> ends;
  for (const Instance& instance : instances_) ends.push_back(instance.begin + instance.count);
  const std::vector<uint64_t> added = sequence_.pad(ends, unit, group);
  uint64_t before = 0;
  for (size_t i = 0; i < instances_.size(); ++i) {
    instances_[i].begin += before;
    instances_[i].count += added[i];
    before += added[i];
  }
}

// sections: every instance is one.
void CompressedLayout::place_instances(uint64_t align, bool sections, bool scales) {
  for (size_t i = 0; i < instances_.size(); ++i) {
    if (i == 0 || sections) {
      LayoutSection section;
      section.first_instance = i;
      section.flat_begin = shard_elements();
      section.server_begin = chunk_;
      sections_.push_back(section);
    }
    LayoutSection& section = sections_.back();
    Instance& instance = instances_[i];
    const uint64_t unit = align * servers_;
    instance.section = static_cast<uint32_t>(sections_.size() - 1);
    instance.chunk = align * ((instance.count + unit - 1) / unit);
    instance.chunk_begin = section.chunk;
    instance.worker_first_block = worker_blocks_;
    instance.server_first_block = server_blocks_;
    ++section.instances;
    section.chunk += instance.chunk;
    chunk_ += instance.chunk;
    worker_blocks_ += blocks_of(instance.chunk) * servers_;
    server_blocks_ += blocks_of(instance.chunk);
  }
  for (LayoutSection& section : sections_) {
    section.message_offset = message_bytes_;
    section.message_bytes = scale_message_bytes(scales ? section.instances : 0);
    message_bytes_ += section.message_bytes * servers_;
  }
}

std::vector<uint32_t> CompressedLayout::flagged(std::span<const std::byte> area) const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < servers_; ++r) {
    uint32_t flags = 0;
    for (const LayoutSection& s : sections_) {
      uint32_t word = 0;
      std::memcpy(&word, &area[s.message_offset + (r + 1) * s.message_bytes - 4], 4);
      flags |= word;
    }
    if (flags != 0) out.push_back(r);
  }
  return out;
}

uint64_t CompressedLayout::begin(const Instance& instance, uint32_t chunk) const {
  return ends_.empty() ? chunk * instance.chunk : chunk_begin(sections_.front(), chunk);
}
uint64_t CompressedLayout::length(const Instance& instance, uint32_t chunk) const {
  return ends_.empty() ? instance.chunk : chunk_count(sections_.front(), chunk);
}
uint64_t CompressedLayout::valid(const Instance& instance, uint32_t chunk) const {
  const uint64_t first = begin(instance, chunk);
  return first >= instance.count ? 0 : std::min(length(instance, chunk), instance.count - first);
}
uint32_t CompressedLayout::chunk_of(const Instance& instance, uint64_t element) const {
  if (ends_.empty()) return static_cast<uint32_t>(element / instance.chunk);
  return static_cast<uint32_t>(std::ranges::upper_bound(ends_, element) - ends_.begin());
}

size_t CompressedLayout::instance_at(const LayoutSection& section, uint64_t within_chunk) const {
  const auto first = instances_.begin() + static_cast<ptrdiff_t>(section.first_instance);
  const auto it =
      std::upper_bound(first, first + static_cast<ptrdiff_t>(section.instances), within_chunk,
                       [](uint64_t at, const Instance& i) { return at < i.chunk_begin; });
  return static_cast<size_t>(it - instances_.begin()) - 1;
}

// Where the scale of an instance stands in the message of a chunk's owner, in the message area.
uint32_t CompressedLayout::message_word(const Instance& instance, size_t index,
                                        uint32_t chunk) const {
  const LayoutSection& s = sections_[instance.section];
  return static_cast<uint32_t>((s.message_offset + chunk * s.message_bytes) / 4 + index -
                               s.first_instance);
}

std::vector<LayoutSegment> CompressedLayout::segments(uint32_t section, uint32_t chunk,
                                                      uint64_t elements) const {
  const uint64_t limit = std::max(kNormBlock, elements / kNormBlock * kNormBlock);
  std::vector<LayoutSegment> out;
  const LayoutSection& s = sections_[section];
  LayoutSegment current{chunk_begin(s, chunk), 0, section};
  for (size_t i = s.first_instance; i < s.first_instance + s.instances; ++i) {
    const Instance& instance = instances_[i];
    const uint64_t all = length(instance, chunk);
    uint64_t done = 0;
    while (done < all) {
      // Up to the limit, but inside an instance only whole norm blocks.
      const uint64_t room = limit - current.count;
      uint64_t take = all - done;
      if (take > room) take = room / kNormBlock * kNormBlock;
      current.count += take;
      done += take;
      if (done < all || current.count >= limit) {
        if (current.count > 0) out.push_back(current);
        current = {current.begin + current.count, 0, section};
      }
    }
  }
  if (current.count > 0) out.push_back(current);
  return out;
}

void CompressedLayout::append_pieces(uint32_t chunk, const LayoutSegment& segment, bool server,
                                     std::vector<Piece>* out) const {
  const LayoutSection& section = sections_[segment.section];
  const uint64_t base = chunk_begin(section, chunk);
  uint64_t at = segment.begin - base;  // within the chunk
  const uint64_t end = at + segment.count;
  const uint64_t flat_base = server ? section.server_begin : base;
  for (size_t i = instance_at(section, at); at < end; ++i) {
    const Instance& instance = instances_[i];
    const uint64_t first_block =
        server ? instance.server_first_block
               : instance.worker_first_block + chunk * blocks_of(instance.chunk);
    uint64_t local = at - instance.chunk_begin;  // within the instance's chunk
    const uint64_t stop = std::min(instance.chunk, end - instance.chunk_begin);
    const uint64_t real = valid(instance, chunk);
    while (local < stop) {
      Piece piece;
      piece.flat = flat_base + instance.chunk_begin + local;
      piece.block = first_block + local / kNormBlock;
      piece.lane = static_cast<uint32_t>(local % kNormBlock);
      piece.scale = static_cast<uint32_t>(i);
      piece.chunk = chunk;
      piece.message = server ? static_cast<uint32_t>(i - section.first_instance)
                             : message_word(instance, i, chunk);
      if (local >= real) {
        piece.tensor = kNoTensor;
        piece.count = stop - local;
      } else {
        const uint64_t position = instance.begin + begin(instance, chunk) + local;
        const TensorSequence::Span& span = sequence_.span_at(position);
        const LayoutTensor& tensor = sequence_[span.tensor];
        piece.tensor = span.tensor;
        piece.group = tensor.group;
        piece.offset = piece.target = position - span.begin;
        piece.count = std::min({tensor.count - piece.offset, real - local, stop - local});
      }
      local += piece.count;
      out->push_back(piece);
    }
    at = instance.chunk_begin + instance.chunk;
  }
}

std::vector<Piece> CompressedLayout::worker_pieces(uint32_t chunk,
                                                   const LayoutSegment& segment) const {
  std::vector<Piece> out;
  append_pieces(chunk, segment, false, &out);
  return out;
}

std::vector<Piece> CompressedLayout::server_pieces(uint32_t chunk,
                                                   const LayoutSegment& segment) const {
  std::vector<Piece> out;
  append_pieces(chunk, segment, true, &out);
  return out;
}

// Behind the chunks: one run, which has no chunk and no scale.
std::vector<Piece> CompressedLayout::uncompressed_pieces(uint32_t tensor) const {
  Piece piece;
  piece.flat = compressed_elements() + sequence_.begin_of(tensor);
  piece.count = sequence_[tensor].count;
  piece.block = sequence_.first_block_of(tensor);
  piece.tensor = tensor;
  piece.group = sequence_[tensor].group;
  return {piece};
}

std::vector<Piece> CompressedLayout::tensor_pieces(uint32_t tensor) const {
  std::vector<Piece> out;
  const uint64_t count = sequence_[tensor].count;
  if (count == 0) return out;
  if (!sequence_[tensor].compressed) return uncompressed_pieces(tensor);
  const uint64_t begin = sequence_.begin_of(tensor);
  auto instance = std::upper_bound(instances_.begin(), instances_.end(), begin,
                                   [](uint64_t p, const Instance& i) { return p < i.begin; }) -
                  1;
  for (uint64_t done = 0; done < count;) {
    uint64_t in_instance = begin + done - instance->begin;
    if (in_instance == instance->count) {
      ++instance;
      in_instance = 0;
    }
    const auto index = static_cast<size_t>(instance - instances_.begin());
    Piece piece;
    piece.chunk = chunk_of(*instance, in_instance);
    const uint64_t local = in_instance - this->begin(*instance, piece.chunk);
    piece.flat =
        chunk_begin(sections_[instance->section], piece.chunk) + instance->chunk_begin + local;
    piece.offset = piece.target = done;
    piece.count = std::min(
        {count - done, length(*instance, piece.chunk) - local, instance->count - in_instance});
    piece.block = sequence_.first_block_of(tensor) + done / kNormBlock;
    piece.lane = static_cast<uint32_t>(done % kNormBlock);
    piece.tensor = tensor;
    piece.scale = static_cast<uint32_t>(index);
    piece.message = message_word(*instance, index, piece.chunk);
    piece.group = sequence_[tensor].group;
    out.push_back(piece);
    done += piece.count;
  }
  return out;
}

std::vector<NormRange> CompressedLayout::worker_ranges(uint32_t shard) const {
  std::vector<NormRange> out;
  for (const Instance& i : instances_) {
    const uint64_t blocks = blocks_of(i.chunk) * per_shard_;
    uint64_t count = 0;
    for (uint32_t k = 0; k < per_shard_; ++k) count += valid(i, shard * per_shard_ + k);
    out.push_back({i.worker_first_block + shard * blocks, blocks, count, 0, 0});
  }
  return out;
}

std::vector<NormRange> CompressedLayout::server_ranges(uint32_t chunk) const {
  std::vector<NormRange> out;
  for (const Instance& i : instances_) {
    out.push_back({i.server_first_block, blocks_of(i.chunk), valid(i, chunk), 0, 0});
  }
  return out;
}

std::vector<NormRange> CompressedLayout::tensor_ranges() const {
  std::vector<NormRange> out;
  for (uint32_t t = 0; t < tensors().size(); ++t) {
    const LayoutTensor& tensor = sequence_[t];
    out.push_back(
        {sequence_.first_block_of(t), blocks_of(tensor.count), tensor.count, tensor.group, t});
  }
  return out;
}

namespace {

template <class Pieces>
std::vector<Piece> whole_chunk(const CompressedLayout& layout, uint32_t chunk, Pieces&& pieces) {
  std::vector<Piece> out;
  for (uint32_t s = 0; s < layout.sections().size(); ++s) {
    const LayoutSection& section = layout.sections()[s];
    const LayoutSegment all{layout.chunk_begin(section, chunk), layout.chunk_count(section, chunk),
                            s};
    for (const Piece& piece : pieces(all)) out.push_back(piece);
  }
  return out;
}

}  // namespace

std::vector<Piece> worker_chunk(const CompressedLayout& layout, uint32_t chunk) {
  return whole_chunk(layout, chunk,
                     [&](const LayoutSegment& s) { return layout.worker_pieces(chunk, s); });
}

std::vector<Piece> server_chunk(const CompressedLayout& layout, uint32_t chunk) {
  return whole_chunk(layout, chunk,
                     [&](const LayoutSegment& s) { return layout.server_pieces(chunk, s); });
}

}  // namespace sotto
