#include "core/engine/scratch_pool.h"

#include <algorithm>

namespace sotto {
namespace {

uint64_t allocated(uint64_t bytes) { return std::max<uint64_t>(bytes, 1); }

}  // namespace

ScratchPool::~ScratchPool() {
  for (const ScratchBlock& block : free_) release(block);
}

Result<ScratchBlock> ScratchPool::take(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::lower_bound(free_, bytes, {}, &ScratchBlock::bytes);
  if (found != free_.end()) {
    const ScratchBlock block = *found;
    free_.erase(found);
    return block;
  }
  if (!free_.empty()) {
    release(free_.back());
    free_.pop_back();
  }
  ScratchBlock block{nullptr, bytes};
  SOTTO_ASSIGN(block.memory, device_->alloc(allocated(bytes)));
  held_bytes_ += bytes;
  return block;
}

void ScratchPool::give_back(ScratchBlock block) {
  const std::lock_guard lock(mutex_);
  free_.insert(std::ranges::lower_bound(free_, block.bytes, {}, &ScratchBlock::bytes), block);
}

uint64_t ScratchPool::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

void ScratchPool::release(const ScratchBlock& block) {
  held_bytes_ -= block.bytes;
  device_->free(block.memory, allocated(block.bytes));
}

}  // namespace sotto
