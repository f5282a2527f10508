#include "core/codec/onebit_layout.h"

#include <algorithm>

namespace sotto {
namespace {

uint64_t blocks_of(uint64_t elements) { return (elements + kNormBlock - 1) / kNormBlock; }

}  // namespace

OnebitLayout::OnebitLayout(std::vector<OnebitTensor> tensors, uint32_t ranks, uint64_t align,
                           OnebitGranularity granularity)
    : tensors_(std::move(tensors)), ranks_(ranks) {
  instance_of_.resize(tensors_.size());
  start_of_.resize(tensors_.size());
  for (uint32_t t = 0; t < tensors_.size(); ++t) {
    first_block_of_.push_back(tensor_blocks_);
    tensor_blocks_ += blocks_of(tensors_[t].count);
    elements_ += tensors_[t].count;
    if (tensors_[t].count == 0) continue;
    if (instances_.empty() || granularity == OnebitGranularity::kTensor) instances_.emplace_back();
    Instance& instance = instances_.back();
    instance_of_[t] = static_cast<uint32_t>(instances_.size() - 1);
    start_of_[t] = instance.count;
    instance.tensors.push_back(t);
    instance.starts.push_back(instance.count);
    instance.count += tensors_[t].count;
  }
  for (Instance& instance : instances_) {
    const uint64_t unit = align * ranks_;
    instance.chunk = align * ((instance.count + unit - 1) / unit);
    instance.chunk_begin = chunk_;
    instance.worker_first_block = worker_blocks_;
    instance.server_first_block = server_blocks_;
    chunk_ += instance.chunk;
    worker_blocks_ += blocks_of(instance.chunk) * ranks_;
    server_blocks_ += blocks_of(instance.chunk);
  }
}

uint64_t OnebitLayout::valid(const Instance& instance, uint32_t chunk) const {
  const uint64_t begin = chunk * instance.chunk;
  return begin >= instance.count ? 0 : std::min(instance.chunk, instance.count - begin);
}

size_t OnebitLayout::instance_at(uint64_t within_chunk) const {
  const auto it =
      std::upper_bound(instances_.begin(), instances_.end(), within_chunk,
                       [](uint64_t at, const Instance& i) { return at < i.chunk_begin; });
  return static_cast<size_t>(it - instances_.begin()) - 1;
}

std::vector<OnebitSegment> OnebitLayout::segments(uint32_t chunk, uint64_t elements) const {
  const uint64_t limit = std::max(kNormBlock, elements / kNormBlock * kNormBlock);
  std::vector<OnebitSegment> out;
  const uint64_t base = chunk * chunk_;
  OnebitSegment current{base, 0};
  for (const Instance& instance : instances_) {
    uint64_t done = 0;
    while (done < instance.chunk) {
      // Up to the limit, but inside an instance only whole norm blocks.
      const uint64_t room = limit - current.count;
      uint64_t take = instance.chunk - done;
      if (take > room) take = room / kNormBlock * kNormBlock;
      current.count += take;
      done += take;
      if (done < instance.chunk || current.count >= limit) {
        if (current.count > 0) out.push_back(current);
        current = {current.begin + current.count, 0};
      }
    }
  }
  if (current.count > 0) out.push_back(current);
  return out;
}

void OnebitLayout::append_pieces(uint32_t chunk, const OnebitSegment& segment, bool server,
                                 std::vector<Piece>* out) const {
  const uint64_t base = chunk * chunk_;
  uint64_t at = segment.begin - base;  // within the chunk
  const uint64_t end = at + segment.count;
  for (size_t i = instance_at(at); i < instances_.size() && at < end; ++i) {
    const Instance& instance = instances_[i];
    const uint64_t first_block =
        server ? instance.server_first_block
               : instance.worker_first_block + chunk * blocks_of(instance.chunk);
    uint64_t local = at - instance.chunk_begin;  // within the instance's chunk
    const uint64_t stop = std::min(instance.chunk, end - instance.chunk_begin);
    const uint64_t real = valid(instance, chunk);
    while (local < stop) {
      Piece piece;
      piece.flat = (server ? 0 : base) + instance.chunk_begin + local;
      piece.block = first_block + local / kNormBlock;
      piece.lane = static_cast<uint32_t>(local % kNormBlock);
      piece.scale = static_cast<uint32_t>(i);
      piece.chunk = chunk;
      if (local >= real) {
        piece.tensor = kNoTensor;
        piece.count = stop - local;
      } else {
        const uint64_t in_instance = chunk * instance.chunk + local;
        const auto it =
            std::upper_bound(instance.starts.begin(), instance.starts.end(), in_instance) - 1;
        const size_t index = static_cast<size_t>(it - instance.starts.begin());
        piece.tensor = instance.tensors[index];
        piece.group = tensors_[piece.tensor].group;
        piece.offset = piece.target = in_instance - *it;
        piece.count =
            std::min({tensors_[piece.tensor].count - piece.offset, real - local, stop - local});
      }
      local += piece.count;
      out->push_back(piece);
    }
    at = instance.chunk_begin + instance.chunk;
  }
}

std::vector<Piece> OnebitLayout::worker_pieces(uint32_t chunk, const OnebitSegment& segment) const {
  std::vector<Piece> out;
  append_pieces(chunk, segment, false, &out);
  return out;
}

std::vector<Piece> OnebitLayout::server_pieces(uint32_t chunk, const OnebitSegment& segment) const {
  std::vector<Piece> out;
  append_pieces(chunk, segment, true, &out);
  return out;
}

std::vector<Piece> OnebitLayout::tensor_pieces(uint32_t tensor) const {
  std::vector<Piece> out;
  const uint64_t count = tensors_[tensor].count;
  if (count == 0) return out;
  const Instance& instance = instances_[instance_of_[tensor]];
  for (uint64_t done = 0; done < count;) {
    const uint64_t in_instance = start_of_[tensor] + done;
    Piece piece;
    piece.chunk = static_cast<uint32_t>(in_instance / instance.chunk);
    const uint64_t local = in_instance % instance.chunk;
    piece.flat = piece.chunk * chunk_ + instance.chunk_begin + local;
    piece.offset = piece.target = done;
    piece.count = std::min(count - done, instance.chunk - local);
    piece.block = first_block_of_[tensor] + done / kNormBlock;
    piece.lane = static_cast<uint32_t>(done % kNormBlock);
    piece.tensor = tensor;
    piece.scale = instance_of_[tensor];
    piece.group = tensors_[tensor].group;
    out.push_back(piece);
    done += piece.count;
  }
  return out;
}

std::vector<NormRange> OnebitLayout::worker_ranges() const {
  std::vector<NormRange> out;
  for (const Instance& i : instances_) {
    out.push_back({i.worker_first_block, blocks_of(i.chunk) * ranks_, i.count, 0, 0});
  }
  return out;
}

std::vector<NormRange> OnebitLayout::server_ranges(uint32_t chunk) const {
  std::vector<NormRange> out;
  for (const Instance& i : instances_) {
    out.push_back({i.server_first_block, blocks_of(i.chunk), valid(i, chunk), 0, 0});
  }
  return out;
}

std::vector<NormRange> OnebitLayout::tensor_ranges() const {
  std::vector<NormRange> out;
  for (uint32_t t = 0; t < tensors_.size(); ++t) {
    out.push_back({first_block_of_[t], blocks_of(tensors_[t].count), tensors_[t].count,
                   tensors_[t].group, t});
  }
  return out;
}

}  // namespace sotto
