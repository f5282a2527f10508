// Every function and type of sotto.hpp in use, to be compiled in every dialect, with and without
// exceptions (compile_matrix.py). It does not run.
#include <sotto/sotto.hpp>

#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

namespace {

#if defined(SOTTO_CPP_NO_EXCEPTIONS)
template <class T>
T got(sotto::result<T> r) {
  return r.ok() ? r.take() : T();
}
bool got(const sotto::result<void>& r) {
  return r.ok() && r.error().ok() && r.code() == SOTTO_OK && r.text().empty();
}
#define DO(call) static_cast<void>(got(call))
#else
template <class T>
T got(T value) {
  return value;
}
#define DO(call) static_cast<void>(call)
#endif

void library() {
  sotto::abi_version();
  sotto::version_string();
  sotto::build_info();
  sotto::status_name(SOTTO_E_BUSY);
  DO(sotto::set_log(nullptr, nullptr, 0));
  DO(sotto::config_report("{}", 2, 10));
  DO(sotto::config_resolve(std::string("{}"), "{}"));
  DO(sotto::predict_report("{}"));
}

sotto::comm meeting(sotto::context& context) {
  DO(context.poll(std::chrono::milliseconds(1)));
  DO(context.report());
  const sotto_unique_id id = got(context.unique_id());
  const auto gather = [](void*, const void*, std::uint64_t, void*) -> std::int32_t { return 0; };
  sotto::comm_config config;
  config.rank(0, 1).id(id).transport("tcp").timeout(std::chrono::seconds(3));
  config.all_gather(gather, nullptr).native_comm(nullptr);
  return got(sotto::comm::create(context, config));
}

void ask(sotto::comm& comm) {
  DO(comm.rank());
  DO(comm.size());
  DO(comm.report("counters"));
  DO(comm.counters());
  DO(comm.plan("{}"));
  comm.error().message();
  DO(comm.abort("why"));
  DO(comm.split(0, 0));
}

template <class Starter>
void collectives(Starter& starter, const sotto::call& options) {
  std::vector<float> x(8), y(8);
  const std::vector<std::uint64_t> counts(1, 8);
  const std::vector<std::uint64_t> offsets(1);
  sotto::parts both;
  both.in(counts, offsets).out(counts, offsets);
  const std::array<sotto::parts, 1> split{{both}};
  const sotto_buffer many[] = {sotto::buffer_of(x), sotto::buffer_of(y.data(), 3)};
  DO(starter.barrier(options));
  DO(starter.broadcast(x, 0, options));
  DO(starter.broadcast(x, y, 0));
  DO(starter.all_gather(x, y));
  DO(starter.all_gather_v(x, y, split));
  DO(starter.reduce_scatter(x, y));
  DO(starter.reduce_scatter_v(x, y, split));
  DO(starter.reduce(x, 0));
  DO(starter.reduce(x, y, 0));
  DO(starter.all_reduce(many));
  DO(starter.all_reduce(x, y));
  DO(starter.gather(x, y, 0));
  DO(starter.scatter(x, y, 0));
  DO(starter.all_to_all(x, y));
  DO(starter.all_to_all(x, y, split));
  DO(starter.send(x, 1));
  DO(starter.recv(x, 1));
}

void operations(sotto::comm& comm) {
  float x[4] = {};
  sotto::op op = got(comm.all_reduce(x));
  DO(op.test());
  DO(op.wait_for(std::chrono::milliseconds(1)));
  DO(op.stream_wait(nullptr));
  DO(op.stats());
  op.error().in_progress();
  DO(op.wait());
  DO(op.detach());
  std::vector<sotto::op> ops;
  ops.push_back(std::move(op));
  DO(sotto::wait_any(ops));
  DO(sotto::wait_all(ops, std::chrono::seconds(1)));
  DO(sotto::wait(comm.barrier()));
}

template <class Stateful>
void states(Stateful& object) {
  const std::vector<std::uint8_t> state = got(object.state_export(sotto::state_mode::exact));
  DO(object.state_import(sotto::state_mode::exact, state));
}

void compressed(sotto::comm& comm) {
  sotto::codec codec =
      got(sotto::codec::create(comm, "{\"type\": \"onebit\"}", sotto::buffer_like<float>(8)));
  states(codec);
  sotto::call options;
  options.tag(1).stream(nullptr).timeout(sotto::no_limit()).priority(3).background().encode(codec);
  options.reduce(sotto::reduce_op::mean).no_block();
  options.on_done([](void*, sotto_status) {}, nullptr, true);
  collectives(comm, options);
  DO(codec.close());
}

void optimizer(sotto::comm& comm) {
  std::vector<float> weights(8), gradients(8);
  std::vector<sotto::float16> copies(8);
  const std::vector<std::uint8_t> mask(8);
  std::vector<sotto::param> params;
  params.push_back(sotto::param("w", weights).grad(gradients).model_copy(copies).mask(mask));
  params.back().group(0).models(1);
  sotto::optim optim = got(sotto::optim::create(comm, "{}", params));
  sotto::op step = got(optim.step());
  DO(optim.replay(step));
  DO(optim.accumulate());
  DO(optim.synchronize());
  DO(optim.set("lr", 0.1));
  DO(optim.set_grads(gradients));
  DO(optim.set_params(weights, copies));
  DO(optim.set_frozen(mask));
  DO(optim.info());
  DO(optim.report("config"));
  states(optim);
  DO(optim.state_import_arrays(
      std::array<sotto::named_array, 1>{{sotto::named_array("w/exp_avg", gradients)}}));
  DO(optim.state_write(sotto::state_mode::exact, [](const void*, std::uint64_t) { return true; }));
  const auto read = [](std::uint64_t, void*, std::uint64_t) { return true; };
  DO(optim.state_read(sotto::state_mode::exact, read, 10));
  DO(optim.set_user_state(std::string("bytes")));
  DO(optim.user_state());
  DO(sotto::overlap::create_step(optim, "{}"));
  sotto::outer outer = got(optim.outer());
  DO(outer.set("loss", 1.0));
  DO(outer.set_params(weights));
  DO(outer.step());
  DO(outer.flush());
  DO(outer.swap());
  DO(outer.vote(1));
  DO(outer.info());
  states(outer);
  DO(sotto::outer::create(comm, "{}", params));
  DO(sotto::outer::create_sharded(comm, comm, "{}", params));
}

void overlapped(sotto::comm& comm) {
  std::vector<float> g(8);
  sotto::overlap overlap = got(sotto::overlap::create(comm, "{}", g));
  const std::uint64_t indices[] = {0};
  sotto::overlap_round round = got(overlap.begin());
  DO(round.ready(0));
  DO(round.ready(0, g));
  DO(round.ready(indices));
  DO(round.ready(indices, g));
  DO(round.unused(indices));
  DO(round.finish());
  DO(round.withdraw("why"));
  DO(round.wait());
  static_cast<void>(round.error());
  static_cast<void>(round.get());
  DO(round.test());
  DO(round.wait_for(std::chrono::seconds(1)));
  DO(round.stats());
  DO(overlap.info());
  DO(overlap.report("order"));
  states(overlap);
}

}  // namespace

void every_call();
void every_call() {
  library();
  sotto::context_config config;
  config.no_progress_thread().cpu_threads(1).max_ops(8);
  sotto::context context = got(sotto::context::create(config));
  DO(context.trace_span("forward", 0, 1));
  sotto::comm comm = meeting(context);
  ask(comm);
  operations(comm);
  compressed(comm);
  sotto::group group = got(comm.group());
  collectives(group, sotto::call());
  DO(group.end());
  optimizer(comm);
  overlapped(comm);
#if __cplusplus >= 202002L
  std::vector<double> x(4);
  DO(comm.all_reduce(std::span<double>(x)));
  DO(comm.all_reduce(std::span<const double>(x), x));
#endif
}
