#include "core/kernels/pieces.h"

#include <algorithm>

namespace sotto {
namespace {

// Appends a run, as part of the last piece where it continues that.
void append_run(const Piece& piece, uint64_t first, uint64_t count, std::vector<Piece>* out) {
  if (first != 0 && !out->empty()) {
    Piece& last = out->back();
    if (last.tensor == piece.tensor && last.flat + last.count == piece.flat + first) {
      last.count += count;
      return;
    }
  }
  out->push_back(sub_piece(piece, first, count));
}

}  // namespace

Piece sub_piece(const Piece& piece, uint64_t first, uint64_t count) {
  Piece part = piece;
  const uint64_t position = piece.lane + first;
  part.flat += first;
  part.offset += first;
  part.target += first;
  part.count = count;
  part.block += position / kNormBlock;
  part.lane = static_cast<uint32_t>(position % kNormBlock);
  return part;
}

uint64_t piece_elements(std::span<const Piece> pieces) {
  uint64_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.count;
  return sum;
}

std::vector<std::vector<Piece>> cut_pieces(std::span<const Piece> pieces, uint64_t max_elements) {
  std::vector<std::vector<Piece>> tables;
  uint64_t filled = 0;   // elements in the last table
  uint64_t current = 0;  // block of the last run
  for_each_block_run(pieces,
                     [&](const Piece& piece, uint64_t first, uint64_t count, uint64_t block) {
                       const bool new_block = tables.empty() || block != current;
                       // A table takes a block only if a whole one fits: its further pieces are not
                       // known yet.
                       if (tables.empty() || (new_block && filled + kNormBlock > max_elements)) {
                         tables.emplace_back();
                         filled = 0;
                       }
                       append_run(piece, first, count, &tables.back());
                       filled += count;
                       current = block;
                     });
  return tables;
}

void share_of_pieces(std::span<const Piece> pieces, uint32_t index, uint32_t shares,
                     std::vector<Piece>* out) {
  const uint64_t total = piece_elements(pieces);
  const uint64_t begin = total / shares * index + total % shares * index / shares;
  const uint64_t end = index + 1 == shares
                           ? total
                           : total / shares * (index + 1) + total % shares * (index + 1) / shares;
  uint64_t at = 0;        // elements before the run
  uint64_t block_at = 0;  // elements before the block of the run: decides which share has the block
  uint64_t current = ~uint64_t{0};
  for_each_block_run(pieces,
                     [&](const Piece& piece, uint64_t first, uint64_t count, uint64_t block) {
                       if (at == 0 || block != current) block_at = at;
                       current = block;
                       at += count;
                       if (block_at >= begin && block_at < end)
                         append_run(piece, first, count, out);
                     });
}

}  // namespace sotto
