// Cutting piece tables: over calls (lowering) and over threads (devices), without changing a bit of
// the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "core/kernels/call.h"

namespace sotto {

// The part of one piece that starts `first` elements after its start and has `count` elements:
// flat, offset, target, block and lane advance with it. first + count <= piece.count.
Piece sub_piece(const Piece& piece, uint64_t first, uint64_t count);

// Calls visit(piece, first, count, block) for every run of a piece that lies in one norm block, in
// order. Element `first` of the piece is the first of the run; its position in the block is
// (piece.lane + first) % kNormBlock.
template <class Visit>
void for_each_block_run(std::span<const Piece> pieces, Visit&& visit) {
  for (const Piece& piece : pieces) {
    uint64_t first = 0;
    while (first < piece.count) {
      const uint64_t position = piece.lane + first;
      const uint64_t count = std::min(piece.count - first, kNormBlock - position % kNormBlock);
      visit(piece, first, count, piece.block + position / kNormBlock);
      first += count;
    }
  }
}

// Elements of all pieces, padding included.
uint64_t piece_elements(std::span<const Piece> pieces);

// Cuts a table into tables of at most `max_elements` elements (at least kNormBlock; a multiple of
// it gives even cuts). A cut lies where a norm block starts: inside a piece only where (lane + j) %
// kNormBlock == 0, between pieces only where the next one starts in another block. Order is kept,
// pieces without elements are dropped.
std::vector<std::vector<Piece>> cut_pieces(std::span<const Piece> pieces, uint64_t max_elements);

// The same for a fixed number of equal shares: appends share `index` of `shares` to `out`. The
// shares of 0 .. shares - 1 are disjoint, in order, and make up the table. Shares may be empty.
// Allocates only where `out` has no capacity left.
void share_of_pieces(std::span<const Piece> pieces, uint32_t index, uint32_t shares,
                     std::vector<Piece>* out);

}  // namespace sotto
