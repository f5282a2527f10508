// What ranks must have alike: at creation, in imported state, and in every step.
#include <algorithm>
#include <bit>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/small_vector.h"
#include "core/base/text.h"
#include "core/optim/optimizer.h"
#include "core/optim/settings.h"

namespace sotto {
namespace {

constexpr uint64_t kHashBytes = uint64_t{16} << 20;  // of device memory at a time
constexpr size_t kMaxRanksNamed = 8;

// What a rank says about the optimizer that it is creating: its hashes, or why it refuses.
struct CreationWord {
  int32_t code = 0;
  uint32_t text_bytes = 0;
  uint64_t text_hash = 0;  // of the whole text
  uint64_t parameters = 0, elements = 0;
  uint64_t registration = 0;
  uint64_t settings = 0, settings_bytes = 0;
  uint64_t group_settings = 0;
  uint64_t values = 0;
  char text[1024] = {};  // its beginning

  void refuse(const Status& status) {
    code = static_cast<int32_t>(status.code());
    text_hash = hash64(status.text());
    text_bytes = static_cast<uint32_t>(std::min(status.text().size(), sizeof text));
    std::memcpy(text, status.text().data(), text_bytes);
  }
  bool refuses_like(const CreationWord& o) const {
    return code == o.code && text_hash == o.text_hash;
  }
};

template <class T>
uint64_t hash_of(const std::vector<T>& values, uint64_t seed) {
  return hash64(values.data(), values.size() * sizeof(T), seed);
}

template <class T>
std::string_view bytes_of(const T* values, size_t n) {
  return {reinterpret_cast<const char*>(values), n * sizeof(T)};
}

// "1, 3, 5", and how many more.
std::string list_of(const std::vector<size_t>& ranks) {
  const size_t shown = std::min(ranks.size(), kMaxRanksNamed);
  std::string out;
  for (size_t i = 0; i < shown; ++i) out += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  if (ranks.size() > shown) out += fmt::format(" and {} more", ranks.size() - shown);
  return out;
}

// The same on all ranks, which have the same words; `mine` is this rank's own refusal.
Status compare(const std::vector<CreationWord>& all, const Status& mine) {
  const CreationWord& first = all[0];
  const auto refuses = [](const CreationWord& w) { return w.code != 0; };
  if (std::all_of(all.begin(), all.end(),
                  [&](const CreationWord& w) { return refuses(w) && w.refuses_like(first); }))
    return mine;
  if (const auto w = std::find_if(all.begin(), all.end(), refuses); w != all.end()) {
    const size_t bytes = std::min<size_t>(w->text_bytes, sizeof w->text);
    return error(static_cast<Code>(w->code), "rank {} refuses: {}", w - all.begin(),
                 printable(std::string_view(w->text, bytes), sizeof w->text));
  }
  for (size_t r = 1; r < all.size(); ++r) {
    const CreationWord& w = all[r];
    if (w.parameters != first.parameters || w.elements != first.elements) {
      return error(Code::kProtocol,
                   "rank 0 registers {} parameters with {} elements, rank {} {} with {}",
                   first.parameters, first.elements, r, w.parameters, w.elements);
    }
    if (w.registration != first.registration) {
      return error(Code::kProtocol,
                   "ranks 0 and {} register parameters with other names, sizes, groups, masks or "
                   "in another order",
                   r);
    }
  }
  return ok_status();
}

}  // namespace

std::string Optimizer::settings() const {
  return common_settings(config_, groups_.size(), loss_scaler_, params_[0].grad_dtype, codec_);
}

uint64_t Optimizer::group_settings_hash() const {
  uint64_t hash = 0;
  for (const OptimizerParams& group : groups_) {
    const uint64_t of_group = hash_of_settings(group);
    hash = hash64(&of_group, sizeof of_group, hash);
  }
  return hash;
}

uint64_t Optimizer::registration_hash() const {
  Hasher64 hasher;
  for (const ParamSpec& p : params_) {
    hasher.update(p.name.data(), p.name.size() + 1);
    hasher.update(&p.count, sizeof p.count);
    hasher.update(&p.group, sizeof p.group);
    const uint64_t mask = p.mask == nullptr ? 0 : hash64(p.mask, p.count, 1);
    hasher.update(&mask, sizeof mask);
  }
  return hasher.digest();
}

// The bits of every parameter, wherever it lies.
Status Optimizer::hash_values() {
  if (config_.sotto.initial_parameters != InitialParameters::kCheck || comm_->size() == 1)
    return ok_status();
  const bool in_place = access_.device()->caps().host_memory;
  constexpr uint64_t kPart = kHashBytes / sizeof(float);
  for (const ParamSpec& p : params_) {
    if (in_place) {
      value_hashes_.push_back(hash64(p.param, p.count * sizeof(float)));
      continue;
    }
    Hasher64 hasher;
    for (uint64_t at = 0; at < p.count; at += kPart) {
      SOTTO_ASSIGN(const std::vector<float> part,
                   access_.download<float>(p.param + at, std::min(kPart, p.count - at)));
      hasher.update(part.data(), part.size() * sizeof(float));
    }
    value_hashes_.push_back(hasher.digest());
  }
  return ok_status();
}

Status Optimizer::meet(Comm& comm, const Result<std::shared_ptr<Optimizer>>& mine) {
  CreationWord word;
  std::string settings;
  if (!mine.ok()) {
    word.refuse(mine.status());
  } else {
    const Optimizer& optimizer = **mine;
    word.parameters = optimizer.params_.size();
    word.elements = optimizer.layout_->elements();
    word.registration = optimizer.registration_hash();
    settings = optimizer.settings();
    word.settings = hash64(settings);
    word.settings_bytes = settings.size();
    word.group_settings = optimizer.group_settings_hash();
    word.values = hash_of(optimizer.value_hashes_, 0);
  }
  const Result<std::vector<std::string>> words =
      comm.exchange(std::string(bytes_of(&word, 1)), OpKind::kOptimCreate);
  if (!words.ok()) return mine.ok() ? words.status() : mine.status();
  std::vector<CreationWord> all(words->size());
  for (size_t r = 0; r < all.size(); ++r) std::memcpy(&all[r], (*words)[r].data(), sizeof word);
  SOTTO_TRY(compare(all, mine.status()));
  const auto same = [&](uint64_t CreationWord::*field) {
    return std::all_of(all.begin(), all.end(),
                       [&](const CreationWord& w) { return w.*field == all[0].*field; });
  };
  if (!same(&CreationWord::settings)) {
    std::vector<uint64_t> bytes;
    for (const CreationWord& w : all) bytes.push_back(w.settings_bytes);
    return explain_common_settings(comm, settings, bytes);
  }
  if (!same(&CreationWord::group_settings)) return explain_groups(comm, (*mine)->groups_);
  return same(&CreationWord::values) ? ok_status() : (*mine)->name_other_values();
}

// Ranks have registered the same, so all of them come here together.
Status Optimizer::name_other_values() const {
  SOTTO_ASSIGN(const std::vector<std::string> all,
               comm_->exchange(std::string(bytes_of(value_hashes_.data(), value_hashes_.size())),
                               OpKind::kOptimCreate));
  for (size_t t = 0; t < params_.size(); ++t) {
    const auto hash_at = [&](size_t rank) {
      uint64_t hash = 0;
      std::memcpy(&hash, all[rank].data() + t * sizeof hash, sizeof hash);
      return hash;
    };
    std::vector<size_t> others;
    for (size_t r = 1; r < all.size(); ++r) {
      if (hash_at(r) != hash_at(0)) others.push_back(r);
    }
    if (others.empty()) continue;
    return error(Code::kProtocol,
                 "parameter \"{}\" has other values on rank {} than on rank 0; give all ranks the "
                 "same, or set sotto.initial_parameters to \"broadcast\" (rank 0's for all) or "
                 "\"trust\"",
                 params_[t].name, list_of(others));
  }
  return error(Code::kInternal, "hashes of parameters differ, but of none of them");
}

// What a group's settings of the next step are, as float32: between machines a schedule may differ
// in the last bits of a double.
uint64_t Optimizer::group_hash(uint64_t group) const {
  const OptimizerParams p = params_of(group);
  // Adding 0 makes one number of 0 and -0.
  const float values[] = {static_cast<float>(lr_of(group)) + 0.0f,
                          static_cast<float>(p.weight_decay) + 0.0f, static_cast<float>(p.beta1),
                          static_cast<float>(p.beta2)};
  return hash64(values, sizeof values);
}

// Of what else callers may set between steps, and of which parameters stand still.
uint64_t Optimizer::other_settings_hash() const {
  uint64_t hash = frozen_hash_;
  for (const OptimizerParams& p : groups_) {
    const double values[] = {p.eps, p.momentum, p.max_coeff, p.min_coeff};
    hash = hash64(values, sizeof values, hash);
  }
  return hash;
}

// Of parts that are the same on all ranks. Between synchronisations 0/1 Adam has but variance and
// anchor; in mode compat replicas keep what rounding makes of them.
uint64_t Optimizer::import_hash(const OptimSnapshot& s,
                                const std::array<uint64_t, kStateParts>& parts) const {
  if (config_.sotto.initial_parameters == InitialParameters::kTrust) return 0;
  const auto of = [&](StatePart part) { return parts[static_cast<size_t>(part)]; };
  const bool moved =
      std::any_of(s.lr_sums.begin(), s.lr_sums.end(), [](double sum) { return sum > 0; });
  std::vector<uint64_t> values{s.step, of(StatePart::kV)};
  if (s.zeroone.frozen && (moved || compat())) {
    values.push_back(of(StatePart::kAnchor));
  } else {
    values.insert(values.end(), {of(StatePart::kM), of(StatePart::kParams)});
  }
  return std::max<uint64_t>(hash_of(values, 0), 1);
}

OpSignature Optimizer::signature(Variant variant) const {
  OpSignature s;
  s.kind = OpKind::kOptimStep;
  s.dtype = static_cast<uint32_t>(Dtype::kF32);
  s.count = layout_->elements();
  SmallVector<uint64_t, 8> groups;
  for (size_t g = 0; g < groups_.size(); ++g) groups.push_back(group_hash(g));
  // Ranks that are at different steps or stages, or that would make other updates, must not mix.
  const uint64_t values[] = {next_t(),
                             traffic_of(variant),
                             static_cast<uint64_t>(kind()),
                             comm_->segment_bytes(),
                             std::bit_cast<uint64_t>(loss_scaler_.scale()),
                             micro_batches_,
                             hash64(groups.data(), groups.size() * sizeof(uint64_t)),
                             other_settings_hash(),
                             imported_};
  s.detail = static_cast<uint32_t>(hash64(values, sizeof values));
  s.root = pack_group_hashes(groups);
  s.reduce = static_cast<uint16_t>(imported_);
  return s;
}

}  // namespace sotto
