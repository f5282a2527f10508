#include "core/optim/agreement.h"

#include <algorithm>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/settings.h"

namespace sotto {
namespace {

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
std::string_view bytes_of(const T* values, size_t n) {
  return {reinterpret_cast<const char*>(values), n * sizeof(T)};
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
      return error(Code::kProtocol, "rank 0 registers {} with {}, rank {} {} with {}",
                   counted(first.parameters, "parameter"), counted(first.elements, "element"), r,
                   w.parameters, w.elements);
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

// Ranks have registered the same, so all of them come here together.
Status name_other_values(Comm& comm, OpKind kind, const CreationTerms& mine) {
  SOTTO_ASSIGN(
      const std::vector<std::string> all,
      comm.exchange(std::string(bytes_of(mine.value_hashes.data(), mine.value_hashes.size())),
                    kind));
  for (size_t t = 0; t < mine.parameters->size(); ++t) {
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
    std::string text = fmt::format(
        "parameter \"{}\" has other values on rank {} than on rank 0; give all ranks the same",
        (*mine.parameters)[t].name, list_of_ranks(others));
    if (!mine.policy.empty()) {
      text +=
          fmt::format(", or set {} to \"broadcast\" (rank 0's for all) or \"trust\"", mine.policy);
    }
    return error(Code::kProtocol, "{}", text);
  }
  return error(Code::kInternal, "hashes of parameters differ, but of none of them");
}

}  // namespace

Result<CreationTerms> creation_terms(const OptimizerData& data, const LossScaler& loss_scaler,
                                     int32_t ranks) {
  CreationTerms terms;
  terms.parameters = &data.parameters;
  terms.groups = &data.groups;
  terms.elements = data.layout->elements();
  terms.settings = common_settings(data.config, data.groups.size(), loss_scaler,
                                   data.parameters.gradients(), data.codec);
  if (data.config.sotto.initial_parameters == InitialParameters::kCheck && ranks > 1) {
    SOTTO_ASSIGN(terms.value_hashes, data.parameters.value_hashes());
  }
  return terms;
}

Status agree(Comm& comm, OpKind kind, const Result<CreationTerms>& mine) {
  CreationWord word;
  std::string settings;
  if (!mine.ok()) {
    word.refuse(mine.status());
  } else {
    word.parameters = mine->parameters->size();
    word.elements = mine->elements;
    word.registration = mine->parameters->registration_hash();
    settings = mine->settings;
    word.settings = hash64(settings);
    word.settings_bytes = settings.size();
    if (mine->groups != nullptr) word.group_settings = mine->groups->settings_hash();
    word.values = hash64(mine->value_hashes.data(), mine->value_hashes.size() * sizeof(uint64_t));
  }
  const Result<std::vector<std::string>> words =
      comm.exchange(std::string(bytes_of(&word, 1)), kind);
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
    return explain_common_settings(comm, kind, settings, bytes);
  }
  if (!same(&CreationWord::group_settings)) return explain_groups(comm, kind, mine->groups->all());
  return same(&CreationWord::values) ? ok_status() : name_other_values(comm, kind, *mine);
}

}  // namespace sotto
