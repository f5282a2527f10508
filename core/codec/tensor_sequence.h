// The tensors of one compressed call as one sequence of elements: by parameter group, then in the
// order of registration. Tensors that are never compressed make a sequence of their own.
#pragma once

#include <cstdint>
#include <vector>

namespace sotto {

struct LayoutTensor {
  uint64_t count = 0;
  uint32_t group = 0;
  bool compressed = true;
};

class TensorSequence {
 public:
  // A tensor that takes part: compressed, with elements.
  struct Span {
    uint64_t begin = 0;  // in the sequence
    uint32_t tensor = 0;
  };

  explicit TensorSequence(std::vector<LayoutTensor> tensors);

  // Makes padding data. The runs of the sequence end at `ends`, ascending, where tensors end; each
  // gets a padding tensor of this group that makes it a multiple of `unit` elements long. Returns
  // the elements that each run has got.
  std::vector<uint64_t> pad(const std::vector<uint64_t>& ends, uint64_t unit, uint32_t group);

  const std::vector<LayoutTensor>& tensors() const { return tensors_; }
  // Tensor tensors().size() + i. Empty if padding is no data.
  const std::vector<LayoutTensor>& padding() const { return padding_; }
  // Of a tensor or of padding.
  const LayoutTensor& operator[](uint32_t t) const {
    return t < tensors_.size() ? tensors_[t] : padding_[t - tensors_.size()];
  }
  // Where it starts, in its sequence; its first norm block, counted over all tensors.
  uint64_t begin_of(uint32_t tensor) const { return begin_of_[tensor]; }
  uint64_t first_block_of(uint32_t tensor) const { return first_block_of_[tensor]; }

  const std::vector<Span>& spans() const { return spans_; }
  // The one that an element of the sequence belongs to.
  const Span& span_at(uint64_t position) const;

  uint64_t length() const { return length_; }      // without padding
  uint64_t elements() const { return elements_; }  // of all tensors
  uint64_t elements_with_padding() const { return elements_ + padding_elements_; }
  // Elements that are never compressed, up to a multiple of 8.
  uint64_t uncompressed() const { return (uncompressed_ + 7) / 8 * 8; }
  uint64_t blocks() const { return blocks_; }

 private:
  std::vector<LayoutTensor> tensors_, padding_;
  std::vector<Span> spans_;
  std::vector<uint64_t> begin_of_, first_block_of_;  // per tensor
  uint64_t elements_ = 0, padding_elements_ = 0;
  uint64_t length_ = 0, uncompressed_ = 0;
  uint64_t blocks_ = 0;
};

}  // namespace sotto
