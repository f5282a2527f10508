#include "capi/src/parts.h"

#include <algorithm>
#include <string_view>

#include "capi/src/struct_in.h"
#include "core/base/text.h"

namespace sotto::capi {
namespace {

// One side of one tensor; `index` is the tensor's, `side` "in" or "out".
struct Side {
  const uint64_t* counts;
  const uint64_t* offsets;
  const Buffer& buffer;
  std::string_view side;
  uint64_t index;
};

Result<std::vector<Range>> take_side(const Side& s, int32_t size) {
  if (s.counts == nullptr) return invalid_argument("parts[{}].{}_counts is NULL", s.index, s.side);
  std::vector<Range> ranges;
  uint64_t behind = 0;  // the end of the part before
  for (int32_t r = 0; r < size; ++r) {
    const Range part{s.offsets != nullptr ? s.offsets[r] : behind, s.counts[r]};
    if (part.begin > s.buffer.count || part.count > s.buffer.count - part.begin) {
      return invalid_argument(
          "parts[{0}].{1}_counts[{2}] is {3} at offset {4}, but {1}[{0}] has {5}", s.index, s.side,
          r, part.count, part.begin, counted(s.buffer.count, "element"));
    }
    behind = part.end();
    ranges.push_back(part);
  }
  return ranges;
}

// Parts that are written must not overlap.
Status check_disjoint(const std::vector<Range>& parts, uint64_t index) {
  std::vector<size_t> order;
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].count != 0) order.push_back(r);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return parts[a].begin < parts[b].begin; });
  for (size_t i = 1; i < order.size(); ++i) {
    const Range& a = parts[order[i - 1]];
    const Range& b = parts[order[i]];
    if (a.end() <= b.begin) continue;
    return invalid_argument(
        "parts[{0}]: the parts of out[{0}] from rank {1} (elements {2} to {3}) and from rank {4} "
        "({5} to {6}) overlap",
        index, order[i - 1], a.begin, a.end(), order[i], b.begin, b.end());
  }
  return ok_status();
}

// Of a reduce-scatter in place: the result is written where this rank's part was read from, which
// ranks may still be sent.
Status check_apart(const std::vector<Range>& parts, int32_t rank, uint64_t index) {
  const Range& mine = parts[static_cast<size_t>(rank)];
  for (size_t r = 0; r < parts.size(); ++r) {
    const Range& part = parts[r];
    if (r == static_cast<size_t>(rank) || part.count == 0) continue;
    if (part.begin >= mine.end() || mine.begin >= part.end()) continue;
    return invalid_argument(
        "parts[{0}]: out[{0}] is in place, at this rank's part of in[{0}] (elements {1} to {2}), "
        "which the part of rank {3} ({4} to {5}) overlaps",
        index, mine.begin, mine.end(), r, part.begin, part.end());
  }
  return ok_status();
}

Result<sotto_parts> take_struct(const sotto_parts* parts, uint64_t index) {
  sotto_parts out;
  SOTTO_TRY(take_element(parts, index, sizeof(sotto_parts), "parts", out));
  if (out.reserved != 0) {
    return unsupported("parts[{}].reserved is {}; this version needs 0", index, out.reserved);
  }
  return out;
}

// Of an all-gather (parts in out) and a reduce-scatter (parts in in).
Status take_one_side(const sotto_parts* parts, std::span<const Buffer> in,
                     std::span<const Buffer> out, CollectiveRequest* r) {
  const bool gathers = r->kind == OpKind::kAllGatherParts;
  const std::string_view side = gathers ? "out" : "in", other = gathers ? "in" : "out";
  for (uint64_t i = 0; i < in.size(); ++i) {
    SOTTO_ASSIGN(const sotto_parts p, take_struct(parts, i));
    const bool has_other = gathers ? p.in_counts != nullptr || p.in_offsets != nullptr
                                   : p.out_counts != nullptr || p.out_offsets != nullptr;
    if (has_other) {
      return invalid_argument(
          "parts[{0}].{1}_counts and {1}_offsets must be NULL: {1}[{0}] is this rank's part alone",
          i, other);
    }
    const Buffer& whole = gathers ? out[i] : in[i];
    const Buffer& part = gathers ? in[i] : out[i];
    SOTTO_ASSIGN(const std::vector<Range> ranges,
                 take_side({gathers ? p.out_counts : p.in_counts,
                            gathers ? p.out_offsets : p.in_offsets, whole, side, i},
                           r->size));
    if (gathers) SOTTO_TRY(check_disjoint(ranges, i));
    const Range& mine = ranges[static_cast<size_t>(r->rank)];
    if (part.count != mine.count) {
      return invalid_argument(
          "{0}[{1}].count is {2} but parts[{1}].{3}_counts[{4}], this rank's, is {5}", other, i,
          part.count, side, r->rank, mine.count);
    }
    const void* const place =
        static_cast<const unsigned char*>(whole.data) + mine.begin * dtype_bytes(whole.dtype);
    const bool in_place = part.count != 0 && part.data == place;
    if (in_place && !gathers) SOTTO_TRY(check_apart(ranges, r->rank, i));
    r->in_place.push_back(in_place ? 1 : 0);
    std::vector<Range>& all = gathers ? r->out_parts : r->in_parts;
    all.insert(all.end(), ranges.begin(), ranges.end());
  }
  return ok_status();
}

}  // namespace

SmallVector<uint64_t> counts_of_parts(const CollectiveRequest& r) {
  SmallVector<uint64_t> counts;
  counts.assign(r.in_place.size(), 0);
  if (r.kind == OpKind::kAllToAllParts) return counts;
  const std::vector<Range>& parts = r.kind == OpKind::kAllGatherParts ? r.out_parts : r.in_parts;
  for (size_t i = 0; i < parts.size(); ++i)
    counts[i / static_cast<size_t>(r.size)] += parts[i].count;
  return counts;
}

Status take_parts(const sotto_parts* parts, std::span<const Buffer> in, std::span<const Buffer> out,
                  CollectiveRequest* r) {
  if (r->kind != OpKind::kAllToAllParts) return take_one_side(parts, in, out, r);
  for (uint64_t i = 0; i < in.size(); ++i) {
    SOTTO_ASSIGN(const sotto_parts p, take_struct(parts, i));
    SOTTO_ASSIGN(const std::vector<Range> from,
                 take_side({p.in_counts, p.in_offsets, in[i], "in", i}, r->size));
    SOTTO_ASSIGN(const std::vector<Range> to,
                 take_side({p.out_counts, p.out_offsets, out[i], "out", i}, r->size));
    SOTTO_TRY(check_disjoint(to, i));
    const auto me = static_cast<size_t>(r->rank);
    if (from[me].count != to[me].count) {
      return invalid_argument(
          "parts[{0}].in_counts[{1}] is {2} and parts[{0}].out_counts[{1}] is {3}: what this rank, "
          "{1}, sends to itself is what it gets from itself",
          i, r->rank, from[me].count, to[me].count);
    }
    const bool in_place = in[i].data == out[i].data && in[i].count != 0 && from == to;
    r->in_place.push_back(in_place ? 1 : 0);
    r->in_parts.insert(r->in_parts.end(), from.begin(), from.end());
    r->out_parts.insert(r->out_parts.end(), to.begin(), to.end());
  }
  return ok_status();
}

}  // namespace sotto::capi
