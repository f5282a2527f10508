#include "core/plan/exchange.h"
#include "core/base/text.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sotto {
namespace {

// This rank's own part, which crosses no network: from `in` at `from` to `out` at `to`, in elements
// of the tensor.
void copy_own_part(Section& s, uint32_t tensor, uint64_t to, uint64_t from, uint64_t count) {
  if (count == 0 || s.request.in_place[tensor]) return;
  s.b.copy({s.slots.out + tensor, to * s.element, count * s.element},
           {s.slots.in + tensor, from * s.element, count * s.element});
}

// checked: for every peer the step after which payload may go to it; empty: at once.
void emit_exchange(Section& in, Section& out, const CollectiveRequest& parts,
                   const std::vector<uint32_t>& tensors, const std::vector<uint32_t>& checked) {
  const auto& r = in.request;
  const std::vector<Range> to = ranges_of(parts.in_parts, tensors, in.ranks());
  const std::vector<Range> from = ranges_of(parts.out_parts, tensors, in.ranks());
  const bool copied =
      std::any_of(tensors.begin(), tensors.end(), [&](uint32_t t) { return r.in_place[t] != 0; });
  for (int32_t peer : in.peers()) {
    for (Range segment : segments_of(to[static_cast<size_t>(peer)], in.segment)) {
      const Region data = contiguous(in, in.slots.in, segment, false, copied);
      in.b.send(peer, data, in.round);
      if (!checked.empty()) in.b.order(in.b.steps() - 1, checked[static_cast<size_t>(peer)]);
    }
  }
  for (int32_t peer : out.peers()) {
    for (Range segment : segments_of(from[static_cast<size_t>(peer)], out.segment))
      receive_range(out, peer, out.slots.out, segment, false, out.round);
  }
  for (uint32_t t : tensors) {
    const size_t mine = size_t{t} * in.ranks() + in.me();
    copy_own_part(in, t, parts.out_parts[mine].begin, parts.in_parts[mine].begin,
                  parts.in_parts[mine].count);
  }
}

// What one rank tells another before an all-to-all with parts: elements of every tensor that it
// sends to it, then elements that it expects from it.
std::vector<uint64_t> pair_counts(const CollectiveRequest& r, int32_t peer, bool receives_first) {
  const size_t tensors = r.dtypes.size();
  std::vector<uint64_t> numbers;
  for (const bool receives : {receives_first, !receives_first}) {
    for (size_t t = 0; t < tensors; ++t) {
      const size_t at = t * static_cast<size_t>(r.size) + static_cast<size_t>(peer);
      numbers.push_back((receives ? r.out_parts : r.in_parts)[at].count);
    }
  }
  return numbers;
}

// The text for a peer that says something else than `mine`: first what it sends to this rank.
std::string explain_counts(int32_t rank, int32_t peer, const std::vector<uint64_t>& mine,
                           std::span<const std::byte> message) {
  std::vector<uint64_t> theirs(mine.size());
  std::memcpy(theirs.data(), message.data(), message.size());
  const auto at = static_cast<size_t>(
      std::mismatch(mine.begin(), mine.end(), theirs.begin()).first - mine.begin());
  const size_t tensors = mine.size() / 2;
  const bool to_me = at < tensors;
  return fmt::format(
      "ranks do not agree on an all_to_all with parts: rank {} of the comm sends {} of "
      "tensor {} to rank {}, which expects {}",
      to_me ? peer : rank, counted(to_me ? theirs[at] : mine[at], "element"), at % tensors,
      to_me ? rank : peer, to_me ? mine[at] : theirs[at]);
}

// The two ranks of every pair compare counts. Returns the step of every peer that has its word.
std::vector<uint32_t> emit_count_checks(PlanBuilder& b, const CollectiveRequest& r,
                                        uint32_t round) {
  std::vector<uint32_t> checked(static_cast<size_t>(r.size), kNoStep);
  for (int32_t i = 1; i < r.size; ++i) {
    const int32_t peer = (r.rank + i) % r.size;
    const std::vector<uint64_t> said = pair_counts(r, peer, false);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(said));
    b.send(peer, {b.constant(bytes), 0, bytes.size()}, round, MessageClass::kMetadata);
  }
  for (int32_t i = 1; i < r.size; ++i) {
    const int32_t peer = (r.rank + i) % r.size;
    const std::vector<uint64_t> wanted = pair_counts(r, peer, true);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(wanted));
    b.recv(peer, {b.host(bytes.size()), 0, bytes.size()}, round, MessageClass::kMetadata);
    b.expect({{bytes.begin(), bytes.end()},
              [wanted, rank = b.comm_rank(r.rank),
               other = b.comm_rank(peer)](std::span<const std::byte> message) {
                return explain_counts(rank, other, wanted, message);
              }});
    checked[static_cast<size_t>(peer)] = b.steps() - 1;
  }
  return checked;
}

// Part k of a tensor of size * counts[t] elements is the k-th of them: an even all-to-all.
std::vector<Range> even_parts(const CollectiveRequest& r) {
  std::vector<Range> parts;
  for (const uint64_t count : r.counts) {
    for (int32_t k = 0; k < r.size; ++k) parts.push_back({static_cast<uint64_t>(k) * count, count});
  }
  return parts;
}

}  // namespace

void emit_gather(Section& s) {
  const int32_t root = s.request.root;
  if (s.request.rank != root) {
    for (Range segment : segments_of({0, s.layout.size()}, s.segment))
      s.b.send(root, contiguous(s, s.slots.in, segment, false), s.round);
    return;
  }
  const uint64_t part = s.layout.size() / s.ranks();
  for (int32_t peer : s.peers()) {
    for (Range segment : segments_of({peer * part, part}, s.segment))
      receive_range(s, peer, s.slots.out, segment, false, s.round);
  }
  const Range mine{s.me() * part, part};
  for (const Piece& piece : s.pieces(mine, mine.begin))
    copy_own_part(s, piece.tensor, piece.offset, piece.target, piece.count);
}

void emit_scatter(Section& s) {
  const int32_t root = s.request.root;
  if (s.request.rank != root) {
    for (Range segment : segments_of({0, s.layout.size()}, s.segment))
      receive_range(s, root, s.slots.out, segment, false, s.round);
    return;
  }
  const uint64_t part = s.layout.size() / s.ranks();
  for (int32_t peer : s.peers()) {
    for (Range segment : segments_of({peer * part, part}, s.segment))
      s.b.send(peer, contiguous(s, s.slots.in, segment, false), s.round);
  }
  const Range mine{s.me() * part, part};
  for (const Piece& piece : s.pieces(mine, mine.begin))
    copy_own_part(s, piece.tensor, piece.target, piece.offset, piece.count);
}

void emit_all_to_all(PlanBuilder& b, const CollectiveRequest& request, const CollectiveSlots& slots,
                     const std::map<Dtype, std::vector<uint32_t>>& by_dtype) {
  const bool uneven = request.kind == OpKind::kAllToAllParts;
  CollectiveRequest parts;
  parts.in_parts = uneven ? request.in_parts : even_parts(request);
  parts.out_parts = uneven ? request.out_parts : parts.in_parts;
  uint32_t round = b.next_round();
  std::vector<uint32_t> checked;
  if (uneven) checked = emit_count_checks(b, request, round++);
  b.reserve_rounds(round + 1);  // not every pair has data
  const auto ranks = static_cast<uint32_t>(request.size);
  for (const auto& entry : by_dtype) {
    const Dtype dtype = entry.first;
    const std::vector<uint32_t>& tensors = entry.second;
    const uint64_t element = dtype_bytes(dtype);
    const auto bits = static_cast<uint32_t>(element * 8);
    const uint64_t segment = segment_elements(request.segment_bytes, bits);
    const auto section = [&](const std::vector<Range>& of) {
      return Section{b,     request, slots,   FlatLayout::by_parts(of, tensors, ranks),
                     dtype, element, segment, round};
    };
    Section in = section(parts.in_parts);
    Section out = section(parts.out_parts);
    emit_exchange(in, out, parts, tensors, checked);
  }
}

}  // namespace sotto
