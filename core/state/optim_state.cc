#include "core/state/optim_state.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/state/meta.h"

namespace sotto {
namespace {

// The first arrays of every blob, empty where the state has none; those of an algorithm follow, and
// error feedback comes last.
constexpr std::string_view kFirstArrays[] = {kParamsArray, "m", "v", "vf", "tensor_states"};
constexpr std::string_view kErrorArrays[] = {kWorkerError, kServerError, kMeanWorkerError,
                                             kMeanServerError};
// Sections that are no arrays.
constexpr std::string_view kOthers[] = {"meta", "counts", "user", "outer"};
// Numbers of the 1-bit types that every description has.
constexpr std::string_view kNumber = "average_since";
constexpr std::string_view kFlags[] = {"compressed", "stage_started"};

template <size_t N>
bool is_in(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

std::string meta_of(const OptimSnapshot& s) {
  StateJson meta{{"kind", "optimizer"},
                 {"algorithm", s.algorithm},
                 {"mode", s.mode},
                 {"step", s.step},
                 {"step_offset", s.step_offset},
                 {kNumber, 0},
                 {kFlags[0], false},
                 {kFlags[1], false},
                 {"scheduler_iteration", s.scheduler_iteration},
                 {"skipped_steps", s.skipped_steps},
                 {"loss_scale",
                  {{"scale", s.loss_scale.scale},
                   {"iteration", s.loss_scale.iteration},
                   {"last_overflow", s.loss_scale.last_overflow}}},
                 {"names", s.names}};
  if (s.residual) meta["residual"] = residual_meta(*s.residual);
  for (const OptimSnapshot::Number& number : s.numbers()) {
    const StateJson value = number.flag ? StateJson(number.value != 0) : StateJson(number.value);
    const size_t dot = number.name.find('.');
    if (dot == std::string::npos) {
      meta[number.name] = value;
    } else {
      meta[number.name.substr(0, dot)][number.name.substr(dot + 1)] = value;
    }
  }
  return dump_text(meta);
}

// A section of a blob: bytes of the snapshot, or an array, whose values may be elsewhere.
struct Section {
  std::string_view name;
  uint64_t bytes = 0;
  const void* data = nullptr;
};

// In the order of the blob. `meta` and the snapshot have to live as long.
std::vector<Section> sections_of(const OptimSnapshot& s, const std::string& meta) {
  std::vector<Section> out;
  const auto array = [&](std::string_view name) {
    const std::span<const std::byte> here = s.values<std::byte>(name);
    out.push_back({name, s.bytes(name), here.empty() ? nullptr : here.data()});
  };
  out.push_back({"meta", meta.size(), meta.data()});
  out.push_back({"counts", s.counts.size() * sizeof(uint64_t), s.counts.data()});
  for (const std::string_view name : kFirstArrays) array(name);
  for (const OptimSnapshot::Array& a : s.arrays()) {
    if (!is_in(kFirstArrays, a.name) && !is_in(kErrorArrays, a.name)) array(a.name);
  }
  if (!s.user.empty()) out.push_back({"user", s.user.size(), s.user.data()});
  if (!s.outer.empty()) out.push_back({"outer", s.outer.size(), s.outer.data()});
  if (s.residual) {
    array(kWorkerError);
    array(kServerError);
  }
  if (s.mean) {
    array(kMeanWorkerError);
    array(kMeanServerError);
  }
  return out;
}

BlobSize size_of(const std::vector<Section>& sections) {
  BlobSize size;
  for (const Section& section : sections) size.add(section.name, section.bytes);
  return size;
}

using ArrayWriter = std::function<Status(std::string_view, const FloatSink&)>;

Status write(const OptimSnapshot& s, const ArrayWriter& arrays, const ByteSink& sink) {
  const std::string meta = meta_of(s);
  const std::vector<Section> sections = sections_of(s, meta);
  BlobStream stream(sink);
  SOTTO_TRY(stream.start(size_of(sections)));
  for (const Section& section : sections) {
    SOTTO_TRY(stream.section(section.name, section.bytes));
    if (section.data != nullptr) {
      SOTTO_TRY(stream.put(section.data, section.bytes));
    } else if (section.bytes != 0) {
      SOTTO_TRY(arrays(section.name, [&](std::span<const float> values) {
        return stream.put(values.data(), values.size_bytes());
      }));
    }
  }
  return stream.finish();
}

ByteSink sink_of(std::vector<std::byte>* out) {
  return [out](std::span<const std::byte> more) {
    out->insert(out->end(), more.begin(), more.end());
    return ok_status();
  };
}

StateErrors imported_errors(StateMode mode) {
  return mode == StateMode::kExact  ? StateErrors::kOwn
         : mode == StateMode::kMean ? StateErrors::kMean
                                    : StateErrors::kNone;
}

// Counters and flags of the algorithm's own: those of the 1-bit types, and objects of them.
Status read_numbers(const StateJson& meta, OptimSnapshot* s) {
  uint64_t number = 0;
  SOTTO_TRY(read_key(meta, kNumber.data(), &number));
  s->set_number(kNumber, number);
  for (const std::string_view name : kFlags) {
    bool flag = false;
    SOTTO_TRY(read_key(meta, name.data(), &flag));
    s->set_flag(name, flag);
  }
  for (const auto& [group, members] : meta.items()) {
    if (!members.is_object() || group == "loss_scale" || group == "residual") continue;
    for (const auto& [key, value] : members.items()) {
      const std::string name = fmt::format("{}.{}", group, key);
      if (value.is_boolean()) {
        s->set_flag(name, value.get<bool>());
      } else if (value.is_number_unsigned()) {
        s->set_number(name, value.get<uint64_t>());
      } else {
        return invalid_argument("the state's description has no valid \"{}\"", printable(name));
      }
    }
  }
  return ok_status();
}

// Says whether an array of a snapshot is left in the blob.
using LeftOutside = std::function<bool(const OptimSnapshot&, std::string_view)>;

Status read_arrays(const BlobReader& reader, const LeftOutside& outside, OptimSnapshot* s) {
  for (const std::string_view name : kFirstArrays) SOTTO_TRY(reader.bytes_of(name).status());
  for (const std::string& name : reader.names()) {
    if (is_in(kOthers, name)) continue;
    if (name != "tensor_states" && (is_in(kFirstArrays, name) || is_in(kErrorArrays, name)))
      SOTTO_TRY(reader.count<float>(name).status());
    SOTTO_ASSIGN(const uint64_t bytes, reader.bytes_of(name));
    if (outside(*s, name)) {
      s->put_outside(name, bytes);
      continue;
    }
    SOTTO_ASSIGN(const std::vector<std::byte> values, reader.values<std::byte>(name));
    s->put(name, values);
  }
  return ok_status();
}

Result<OptimSnapshot> read_snapshot(const BlobReader& reader, const LeftOutside& outside) {
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "optimizer"));
  OptimSnapshot s;
  SOTTO_TRY(read_key(meta, "algorithm", &s.algorithm));
  SOTTO_TRY(read_key(meta, "mode", &s.mode));
  SOTTO_TRY(read_key(meta, "step", &s.step));
  SOTTO_TRY(read_key(meta, "step_offset", &s.step_offset));
  SOTTO_TRY(read_numbers(meta, &s));
  SOTTO_TRY(read_key(meta, "scheduler_iteration", &s.scheduler_iteration));
  // States of before have none.
  if (meta.contains("skipped_steps")) SOTTO_TRY(read_key(meta, "skipped_steps", &s.skipped_steps));
  if (reader.has("user")) {
    SOTTO_ASSIGN(s.user, reader.values<std::byte>("user"));
    if (s.user.size() > kMaxUserState) {
      return invalid_argument("the state has {} bytes of the trainer's own; allowed: at most {}",
                              s.user.size(), kMaxUserState);
    }
  }
  if (reader.has("outer")) {
    SOTTO_ASSIGN(s.outer, reader.values<std::byte>("outer"));
  }
  const auto loss_scale = meta.find("loss_scale");
  if (loss_scale == meta.end() || !loss_scale->is_object())
    return invalid_argument("the state's description has no valid \"loss_scale\"");
  SOTTO_TRY(read_key(*loss_scale, "scale", &s.loss_scale.scale));
  SOTTO_TRY(read_key(*loss_scale, "iteration", &s.loss_scale.iteration));
  SOTTO_TRY(read_key(*loss_scale, "last_overflow", &s.loss_scale.last_overflow));
  const auto names = meta.find("names");
  if (names == meta.end() || !names->is_array())
    return invalid_argument("the state's description has no valid \"names\"");
  for (const StateJson& name : *names) {
    if (!name.is_string())
      return invalid_argument("the state's description has a name that is no string");
    s.names.push_back(name.get<std::string>());
  }
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  // Before arrays: error feedback has a place of its own.
  if (meta.contains("residual")) {
    SOTTO_ASSIGN(s.residual, read_residual_meta(meta));
    for (const std::string_view name : {kWorkerError, kServerError})
      SOTTO_TRY(reader.bytes_of(name).status());
  }
  if (reader.has(kMeanWorkerError)) {
    s.mean.emplace();
    SOTTO_TRY(reader.bytes_of(kMeanServerError).status());
  }
  SOTTO_TRY(read_arrays(reader, outside, &s));
  return s;
}

}  // namespace

StateErrors exported_errors(StateMode mode) {
  if (made_by_one_rank(mode)) return StateErrors::kOwn;
  return mode == StateMode::kMean ? StateErrors::kMean : StateErrors::kNone;
}

std::vector<std::byte> encode_optim(const OptimSnapshot& s) {
  std::vector<std::byte> out;
  // Memory takes everything, and all values are here.
  (void)write(
      s, [](std::string_view, const FloatSink&) { return ok_status(); }, sink_of(&out));
  return out;
}

Result<OptimSnapshot> decode_optim(std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  return read_snapshot(reader, [](const OptimSnapshot&, std::string_view) { return false; });
}

Status export_state(Optimizer& optimizer, StateMode mode, const ByteSink& sink) {
  const StateErrors errors = exported_errors(mode);
  SOTTO_ASSIGN(const OptimSnapshot s, optimizer.describe(errors));
  return write(
      s,
      [&](std::string_view name, const FloatSink& to) {
        return optimizer.stream(name, errors, to);
      },
      sink);
}

Result<std::vector<std::byte>> export_state(Optimizer& optimizer, StateMode mode) {
  std::vector<std::byte> out;
  SOTTO_ASSIGN(const uint64_t bytes, state_bytes(optimizer, mode));
  out.reserve(bytes);
  SOTTO_TRY(export_state(optimizer, mode, sink_of(&out)));
  return out;
}

Result<uint64_t> state_bytes(Optimizer& optimizer, StateMode mode) {
  SOTTO_ASSIGN(const OptimSnapshot s, optimizer.describe(exported_errors(mode)));
  return size_of(sections_of(s, meta_of(s))).total();
}

Status import_state(Optimizer& optimizer, StateMode mode, const ByteSource& source,
                    uint64_t bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(source, bytes));
  // A state of another type is refused before its arrays are looked at.
  const auto outside = [&](const OptimSnapshot& found, std::string_view name) {
    return found.algorithm != optimizer_kind_name(optimizer.config().optimizer.kind) ||
           optimizer.streams(name);
  };
  SOTTO_ASSIGN(OptimSnapshot s, read_snapshot(reader, outside));
  // Of 0/1 Adam between synchronisations: what one rank has summed up becomes everybody's.
  s.one_for_all = mode == StateMode::kCommon;
  return optimizer.restore(
      s, imported_errors(mode), [&](std::string_view name) -> Result<FloatSource> {
        return FloatSource([&reader, name, at = uint64_t{0}](std::span<float> out) mutable {
          const uint64_t first = std::exchange(at, at + out.size_bytes());
          return reader.read(name, first, std::as_writable_bytes(out));
        });
      });
}

Status import_state(Optimizer& optimizer, StateMode mode, std::span<const std::byte> bytes) {
  const ByteSource source = [bytes](uint64_t offset, std::span<std::byte> out) {
    if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
    return ok_status();
  };
  return import_state(optimizer, mode, source, bytes.size());
}

}  // namespace sotto
