// Streams of the caller that wait for a word in pinned memory (cuStreamWaitValue32). CUDA does not
// see who will write the word, so whatever waits for the device meanwhile waits for that too, with
// locks that the writer may need. Only in a process that is set up for it (SOTTO_STREAM_BLOCK).
//
// Threads: any.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/base/status.h"
#include "core/iface/device.h"

namespace sotto {

class StreamBlocks {
 public:
  static constexpr uint32_t kWords = 16384;  // so many streams may be blocked at once
  using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

  explicit StreamBlocks(int32_t device) : device_(device) {}
  // The driver's functions (null: it has none), and kWords words of pinned memory, 0.
  void open(StreamValue wait, StreamValue write, uint32_t* words) {
    wait_ = wait;
    write_ = write;
    words_ = words;
  }

  // UNSUPPORTED: the driver has no such wait, or the process is not set up for it.
  Result<BlockId> block(CUstream stream);
  // The block ends now, or when what `behind` has queued so far has executed (UNSUPPORTED: the
  // driver cannot). It is none any more then, but for errors.
  void unblock(BlockId block);
  Status unblock_behind(CUstream behind, BlockId block);

 private:
  struct Block {
    BlockId id;
    uint32_t value;  // for which the stream waits
  };
  uint32_t* word(BlockId block) const { return words_ + (block - 1); }
  Result<Block> take();
  uint32_t value_of(BlockId block);
  void give_back(BlockId block);

  const int32_t device_;
  StreamValue wait_ = nullptr, write_ = nullptr;
  uint32_t* words_ = nullptr;
  std::mutex mutex_;  // guards what follows; not held in calls of the driver, which may block
  std::vector<uint32_t> values_;  // by number id - 1: that ends the waits so far
  // Given back. A word counts up, so that it can be used again while a slow stream has yet to look
  // at it; and it is used again only when it has its value, which the device may write late.
  std::vector<BlockId> free_;
};

}  // namespace sotto
