// States of an outer optimizer, and how ranks find each other behind them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/outer/outer.h"
#include "core/outer/settings.h"

namespace sotto {
namespace {

// own: of this rank. size: of ranks here.
OuterRestore kind_of(const OuterSnapshot& s, bool own, int32_t size) {
  if (own) return OuterRestore::kExact;
  return s.size == size ? OuterRestore::kCommon : OuterRestore::kAnchor;
}

// The line with this character; "nothing" behind the end.
std::string line_at(const std::string& text, size_t at) {
  if (at >= text.size()) return "nothing";
  const size_t before = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return printable(text.substr(begin, text.find('\n', begin) - begin));
}

}  // namespace

Result<OuterSnapshot> Outer::snapshot() {
  SOTTO_TRY(check_idle());
  OuterSnapshot s;
  s.rank = context_.comm->rank();
  s.size = context_.comm->size();
  s.settings = outer_settings_text(context_.config, parameters_, false);
  s.step = at_.step;
  s.flushed_at = at_.flushed_at;
  s.swapped = swapped_;
  if (uses_lr(context_.config)) {
    s.lr = given_.gamma;
    if (!(given_.gamma > 0)) s.last_rate = given_.last_rate;
  }
  s.tuning = at_.tuning(context_.config);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    SOTTO_ASSIGN(OuterFragmentState state, f->snapshot());
    // Memory of its own for what is swapped stays; behind the second swap it says nothing.
    if (!swapped_) state.arrays[static_cast<size_t>(OuterArray::kSwapped)].clear();
    state.flushed = at_.flushed(s.fragments.size());
    s.fragments.push_back(std::move(state));
  }
  return s;
}

Status Outer::check(const OuterSnapshot& s, bool own) const {
  if (own && (s.rank != context_.comm->rank() || s.size != context_.comm->size())) {
    return invalid_argument(
        "the state is of rank {} of {}; this is rank {} of {}; import the state that this rank has "
        "exported, or this one in mode reset, where error feedback starts at zero",
        s.rank, s.size, context_.comm->rank(), context_.comm->size());
  }
  const std::string mine = outer_settings_text(context_.config, parameters_, false);
  if (s.settings != mine) {
    const auto differs =
        static_cast<size_t>(std::ranges::mismatch(mine, s.settings).in1 - mine.begin());
    return invalid_argument(
        "the state is of other settings or parameters; the first that differs is {} in the state "
        "and {} here",
        line_at(s.settings, differs), line_at(mine, differs));
  }
  const OuterRestore how = kind_of(s, own, context_.comm->size());
  if (how == OuterRestore::kAnchor && context_.config.rule.freshness > 0) {
    return invalid_argument(
        "with freshness {} every rank has an anchor of its own: the state, of {}, cannot be "
        "loaded by {}",
        context_.config.rule.freshness, counted(s.size, "rank"), context_.comm->size());
  }
  if (s.fragments.size() != fragments_.size())
    return invalid_argument("the state has {}, allowed is {}",
                            counted(s.fragments.size(), "fragment"), fragments_.size());
  for (size_t f = 0; f < fragments_.size(); ++f)
    SOTTO_TRY(fragments_[f]->check(s.fragments[f], how));
  return at_.check(s.tuning, context_.config);
}

Status Outer::restore(const OuterSnapshot& s, bool own) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(check(s, own));
  const OuterRestore how = kind_of(s, own, context_.comm->size());
  if (how == OuterRestore::kAnchor) SOTTO_TRY(make_fragments());
  for (size_t f = 0; f < fragments_.size(); ++f) {
    fragments_[f]->await();
    SOTTO_TRY(fragments_[f]->restore(s.fragments[f], how));
    fragments_[f]->report().forget();
    at_.flushes[f] = {s.step, s.fragments[f].flushed};
  }
  // What was told and asked for belongs to steps that are no more.
  given_.votes = given_.asks = 0;
  if (s.lr && !given_.sets_lr) {
    given_.gamma = *s.lr;
    given_.last_rate = s.last_rate.value_or(std::max(0.0, *s.lr));
  }
  events_ = not_finite_ = 0;
  at_.step = s.step;
  // Live parameters that became the anchor have nothing that was not sent.
  at_.flushed_at = how == OuterRestore::kAnchor ? s.step : s.flushed_at;
  swapped_ = how != OuterRestore::kAnchor && s.swapped;
  if (s.tuning) at_.restore(*s.tuning, how != OuterRestore::kAnchor, &context_.config);
  pace_.left();
  restored_ = true;
  return ok_status();
}

Status Outer::restart() {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(make_fragments());
  events_ = not_finite_ = 0;
  updated_last_ = 0;
  swapped_ = restored_ = false;
  pace_.left();
  return start();
}

Status Outer::rejoin(const OuterFragment::Step& step) {
  // Anchors differ with freshness.
  uint64_t anchors = 0;
  if (context_.config.rule.freshness == 0) {
    SOTTO_ASSIGN(const std::vector<std::vector<float>> all, values(OuterArray::kAnchor));
    for (const std::vector<float>& v : all)
      anchors = hash64(v.data(), v.size() * sizeof(float), anchors);
  }
  std::vector<uint64_t> mine{at_.step, at_.flushed_at, anchors, 0};
  if (const std::optional<OuterTuning> t = at_.tuning(context_.config)) {
    const uint64_t terms[] = {t->now.period, t->now.start, t->past.period, t->past.start,
                              t->past_end,   t->measuring, t->asked};
    mine.back() = hash64(terms, sizeof terms);
  }
  constexpr size_t kFirst = 4;  // of the first fragment
  constexpr size_t kAverage = 2, kOfFragment = 3;
  for (size_t f = 0; f < fragments_.size(); ++f) {
    mine.push_back(fragments_[f]->launches());
    mine.push_back(static_cast<uint64_t>(at_.flushed(f)));
    mine.push_back(static_cast<uint64_t>(fragments_[f]->pending()));
  }
  // In the order of averages: ranks that have restored nothing find another operation there.
  SOTTO_ASSIGN(const std::vector<std::string> all,
               context_.reductions->exchange(
                   {reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(uint64_t)},
                   OpKind::kOuterImport));
  std::vector<bool> missing(fragments_.size());
  for (size_t r = 0; r < all.size(); ++r) {
    std::vector<uint64_t> other(mine.size());
    std::memcpy(other.data(), all[r].data(),
                std::min(all[r].size(), mine.size() * sizeof(uint64_t)));
    for (size_t i = 0; i < mine.size(); ++i) {
      const bool of_average = i >= kFirst && (i - kFirst) % kOfFragment == kAverage;
      const bool alike = of_average ? (other[i] == 0) == (mine[i] == 0) : other[i] == mine[i];
      if (!alike) {
        return error(
            Code::kProtocol,
            "outer step {}: rank {} has restored the state of step {}, rank {} that of step "
            "{}, or between other averages, or with another anchor, flush or period",
            at_.step + 1, r, other[0], context_.comm->rank(), at_.step);
      }
      if (of_average && other[i] == static_cast<uint64_t>(OuterPending::kUndelivered))
        missing[(i - kFirst) / kOfFragment] = true;
    }
  }
  for (size_t f = 0; f < fragments_.size(); ++f) {
    if (missing[f]) SOTTO_TRY(fragments_[f]->relaunch(step));
  }
  restored_ = false;
  return ok_status();
}

}  // namespace sotto
