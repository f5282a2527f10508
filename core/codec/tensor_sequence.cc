#include "core/codec/tensor_sequence.h"

#include <algorithm>
#include <numeric>

#include "core/kernels/call.h"

namespace sotto {

TensorSequence::TensorSequence(std::vector<LayoutTensor> tensors)
    : tensors_(std::move(tensors)), begin_of_(tensors_.size()) {
  for (const LayoutTensor& tensor : tensors_) {
    first_block_of_.push_back(blocks_);
    blocks_ += (tensor.count + kNormBlock - 1) / kNormBlock;
  }
  std::vector<uint32_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
    return tensors_[a].group < tensors_[b].group;
  });
  for (const uint32_t t : order) {
    elements_ += tensors_[t].count;
    uint64_t& end = tensors_[t].compressed ? length_ : uncompressed_;
    begin_of_[t] = end;
    if (tensors_[t].compressed && tensors_[t].count != 0) spans_.push_back({end, t});
    end += tensors_[t].count;
  }
}

std::vector<uint64_t> TensorSequence::pad(const std::vector<uint64_t>& ends, uint64_t unit,
                                          uint32_t group) {
  std::vector<Span> spans;
  std::vector<uint64_t> added;
  size_t next = 0;
  uint64_t begin = 0;
  for (const uint64_t end : ends) {
    for (; next < spans_.size() && spans_[next].begin < end; ++next) {
      const Span span{spans_[next].begin + padding_elements_, spans_[next].tensor};
      begin_of_[span.tensor] = span.begin;
      spans.push_back(span);
    }
    const uint64_t missing = (unit - (end - begin) % unit) % unit;
    added.push_back(missing);
    begin = end;
    if (missing == 0) continue;
    spans.push_back(
        {end + padding_elements_, static_cast<uint32_t>(tensors_.size() + padding_.size())});
    begin_of_.push_back(spans.back().begin);
    first_block_of_.push_back(blocks_);
    padding_.push_back({missing, group});
    padding_elements_ += missing;
  }
  spans_ = std::move(spans);
  return added;
}

const TensorSequence::Span& TensorSequence::span_at(uint64_t position) const {
  const auto behind = std::upper_bound(spans_.begin(), spans_.end(), position,
                                       [](uint64_t p, const Span& span) { return p < span.begin; });
  return *(behind - 1);
}

}  // namespace sotto
