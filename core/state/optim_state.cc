#include "core/state/optim_state.h"

#include "core/base/text.h"
#include "core/state/meta.h"

namespace sotto {
std::vector<std::byte> encode_optim(const OptimSnapshot& s) {
  StateJson meta{{"kind", "optimizer"},
                 {"algorithm", s.algorithm},
                 {"mode", s.mode},
                 {"step", s.step},
                 {"step_offset", s.step_offset},
                 {"average_since", s.average_since},
                 {"compressed", s.compressed},
                 {"stage_started", s.stage_started},
                 {"scheduler_iteration", s.scheduler_iteration},
                 {"skipped_steps", s.skipped_steps},
                 {"loss_scale",
                  {{"scale", s.loss_scale.scale},
                   {"iteration", s.loss_scale.iteration},
                   {"last_overflow", s.loss_scale.last_overflow}}},
                 {"names", s.names}};
  if (s.residual) meta["residual"] = residual_meta(*s.residual);
  if (!s.lr_sums.empty()) {
    meta["zeroone"] = {{"var_interval", s.zeroone.var_interval},
                       {"var_counter", s.zeroone.var_counter},
                       {"local_interval", s.zeroone.local_interval},
                       {"local_counter", s.zeroone.local_counter},
                       {"frozen", s.zeroone.frozen}};
  }
  BlobWriter writer;
  writer.add("meta",
             std::string_view(meta.dump(-1, ' ', false, StateJson::error_handler_t::replace)));
  writer.add("counts", s.counts);
  writer.add("params", s.params);
  writer.add("m", s.m);
  writer.add("v", s.v);
  writer.add("vf", s.vf);
  writer.add("tensor_states", s.tensor_states);
  if (!s.padding_m.empty()) writer.add("padding_m", s.padding_m);
  if (!s.lr_sums.empty()) {
    writer.add("lr_sums", s.lr_sums);
    writer.add("anchor_decays", s.anchor_decays);
    writer.add("local_sum", s.local_sum);
    writer.add("anchor", s.anchor);
  }
  if (!s.user.empty()) writer.add("user", s.user);
  if (s.residual) add_residual(*s.residual, &writer);
  if (s.mean) {
    writer.add("mean_worker_error", s.mean->worker);
    writer.add("mean_server_error", s.mean->server);
  }
  return std::move(writer).finish();
}

Result<OptimSnapshot> decode_optim(std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "optimizer"));
  OptimSnapshot s;
  SOTTO_TRY(read_key(meta, "algorithm", &s.algorithm));
  SOTTO_TRY(read_key(meta, "mode", &s.mode));
  SOTTO_TRY(read_key(meta, "step", &s.step));
  SOTTO_TRY(read_key(meta, "step_offset", &s.step_offset));
  SOTTO_TRY(read_key(meta, "average_since", &s.average_since));
  SOTTO_TRY(read_key(meta, "compressed", &s.compressed));
  SOTTO_TRY(read_key(meta, "stage_started", &s.stage_started));
  SOTTO_TRY(read_key(meta, "scheduler_iteration", &s.scheduler_iteration));
  // States of before have none.
  if (meta.contains("skipped_steps"))
    SOTTO_TRY(read_key(meta, "skipped_steps", &s.skipped_steps));
  if (reader.has("user")) {
    SOTTO_ASSIGN(s.user, reader.values<std::byte>("user"));
    if (s.user.size() > kMaxUserState) {
      return invalid_argument("the state has {} bytes of the trainer's own; allowed: at most {}",
                              s.user.size(), kMaxUserState);
    }
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
  SOTTO_ASSIGN(s.params, reader.values<float>("params"));
  SOTTO_ASSIGN(s.m, reader.values<float>("m"));
  SOTTO_ASSIGN(s.v, reader.values<float>("v"));
  SOTTO_ASSIGN(s.vf, reader.values<float>("vf"));
  SOTTO_ASSIGN(s.tensor_states, reader.values<TensorState>("tensor_states"));
  if (reader.has("padding_m")) {
    SOTTO_ASSIGN(s.padding_m, reader.values<float>("padding_m"));
  }
  if (const auto zeroone = meta.find("zeroone"); zeroone != meta.end()) {
    if (!zeroone->is_object())
      return invalid_argument("the state's description has no valid \"zeroone\"");
    SOTTO_TRY(read_key(*zeroone, "var_interval", &s.zeroone.var_interval));
    SOTTO_TRY(read_key(*zeroone, "var_counter", &s.zeroone.var_counter));
    SOTTO_TRY(read_key(*zeroone, "local_interval", &s.zeroone.local_interval));
    SOTTO_TRY(read_key(*zeroone, "local_counter", &s.zeroone.local_counter));
    SOTTO_TRY(read_key(*zeroone, "frozen", &s.zeroone.frozen));
    SOTTO_ASSIGN(s.lr_sums, reader.values<double>("lr_sums"));
    SOTTO_ASSIGN(s.anchor_decays, reader.values<double>("anchor_decays"));
    SOTTO_ASSIGN(s.local_sum, reader.values<float>("local_sum"));
    SOTTO_ASSIGN(s.anchor, reader.values<float>("anchor"));
  }
  if (meta.contains("residual")) {
    SOTTO_ASSIGN(s.residual, read_residual(reader, meta));
  }
  if (reader.has("mean_worker_error")) {
    s.mean.emplace();
    SOTTO_ASSIGN(s.mean->worker, reader.values<float>("mean_worker_error"));
    SOTTO_ASSIGN(s.mean->server, reader.values<float>("mean_server_error"));
  }
  return s;
}

Result<std::vector<std::byte>> export_state(Optimizer& optimizer, StateMode mode) {
  SOTTO_ASSIGN(OptimSnapshot snapshot, optimizer.snapshot(mode == StateMode::kExact));
  // A state for any ranks holds nothing that only this rank has.
  if (mode != StateMode::kExact) SOTTO_TRY(optimizer.make_common(&snapshot));
  if (mode == StateMode::kMean) SOTTO_TRY(optimizer.add_mean(&snapshot));
  return encode_optim(snapshot);
}

Result<uint64_t> state_bytes(Optimizer& optimizer, StateMode mode) {
  SOTTO_ASSIGN(OptimSnapshot snapshot, optimizer.snapshot(mode == StateMode::kExact));
  if (mode == StateMode::kMean && optimizer.keeps_errors()) {
    const std::vector<float> values(snapshot.params.size());
    snapshot.mean = MeanErrorFeedback{values, values};
  }
  return encode_optim(snapshot).size();
}

Status import_state(Optimizer& optimizer, StateMode mode, std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const OptimSnapshot snapshot, decode_optim(bytes));
  if (mode == StateMode::kMean) return optimizer.restore_with_mean(snapshot);
  return optimizer.restore(snapshot, mode == StateMode::kExact);
}

}  // namespace sotto
