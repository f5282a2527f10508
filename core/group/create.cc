// How a root comm comes to be: rendezvous, agreement, connections.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <string>

#include "core/base/hash.h"
#include "core/base/host.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/group/comm.h"
#include "core/group/hosts.h"
#include "core/group/launcher.h"
#include "core/group/process_manager.h"
#include "core/iface/unique_id.h"

namespace sotto {
namespace {

// What ranks exchange before data connections are made.
struct SetupRecord {
  uint32_t version = 10;  // another one where ranks would cut or route messages differently
  uint32_t silence_limit_ms = 0;
  uint64_t segment_bytes = 0;  // 0: what suits the transport
  uint64_t place = 0;  // Backend::place of the transport inside a process; 0: stays with sockets
  char transport[16] = {};
  uint64_t host = 0;       // host_number
  uint64_t shares = 0;     // the same, where this rank may be linked inside its host; 0: it may not
  uint64_t hierarchy = 0;  // Hierarchy
  UniqueId inside = {};    // rank 0: an id of the transport inside its process
};

// Messages of other sizes would make plans that no memory holds.
constexpr uint64_t kLeastSegment = 8192, kMostSegment = 16777216;

struct RootSetup {
  Backend* backend = nullptr;
  // For ranks of one place, and of one host; null: none. The second is also the transport that was
  // asked for by name, if it is one of hosts.
  Backend* inside = nullptr;
  Backend* on_host = nullptr;
  bool alone = false;   // this rank is linked with others by `transport` only
  bool chosen = false;  // the transport, by "auto"
  std::string transport;
  JoinRequest request;
  std::string source;  // which variables of a launcher have said rank and size; empty: none
  std::optional<ManagerPlace> manager;  // through which ranks meet
  // By rank, once agreed, unless all have gone inside: where each is, and with whom it shares a
  // host; 0: with none.
  std::vector<uint64_t> places, shares;
};

struct Agreement {
  uint64_t segment_bytes = 0;            // 0: named by no rank
  uint32_t silence_limit_ms = 0;         // 0: named by no rank
  std::optional<UniqueId> inside;        // for ranks that are all in one place
  std::vector<uint64_t> places, shares;  // as in RootSetup
  std::vector<uint64_t> hosts;           // by rank
  Hierarchy hierarchy = Hierarchy::kFlat;
};

Status check_rank(int32_t rank, int32_t size) {
  if (size < 1 || size > 65535)
    return invalid_argument("comm size is {}; allowed: 1 to 65535", size);
  if (rank < 0 || rank >= size)
    return invalid_argument("rank is {}; allowed: 0 to {}", rank, size - 1);
  return ok_status();
}

// As the launcher says it.
Status launched(Context& context, bool by_address, RootSetup& setup) {
  SOTTO_ASSIGN(const LaunchInfo info, launch_info(context.params(), context.environment()));
  JoinRequest& request = setup.request;
  request.rank = info.rank;
  request.size = info.size;
  setup.source = info.source;
  if (info.size == 1) return ok_status();
  request.address = info.address;
  if (!by_address || !info.address.empty()) return ok_status();
  SOTTO_ASSIGN(MeetingPlace place, meeting_place(info, context.environment()));
  request.address = place.address;
  request.reach = place.reach;
  setup.manager = std::move(place.manager);
  return ok_status();
}

// This rank's place in the group and where the ranks find each other. A single rank needs no
// address.
Status who_and_where(Context& context, const CommConfig& config, RootSetup& setup) {
  JoinRequest& request = setup.request;
  request.rank = config.rank;
  request.size = config.size;
  request.id = config.id;
  request.exchange = config.exchange;
  const bool by_address = !config.id && !config.exchange;
  if (config.size == 0) return launched(context, by_address, setup);
  SOTTO_TRY(check_rank(config.rank, config.size));
  if (config.size > 1 && by_address) {
    request.address = context.params().rendezvous;
    if (request.address.empty()) {
      return invalid_argument(
          "rank {} of {}: no unique id, no all_gather callback and no SOTTO_RENDEZVOUS; one is "
          "needed",
          config.rank, config.size);
    }
  }
  return ok_status();
}

// Transport "auto": what reaches ranks anywhere, and better ones, if there are any, for those that
// turn out to be in one place or on one host.
Status choose_transport(Context& context, RootSetup& setup) {
  SOTTO_ASSIGN(const std::string near, context.auto_transport(Reach::kProcess));
  if (setup.request.size == 1) {
    setup.transport = near;
    return ok_status();
  }
  SOTTO_ASSIGN(setup.transport, context.auto_transport(Reach::kNetwork));
  setup.alone = context.alone(setup.transport);
  SOTTO_ASSIGN(const std::string host, context.auto_transport(Reach::kHost));
  if (host != setup.transport) {
    SOTTO_ASSIGN(setup.on_host, context.backend(host));
  }
  if (near != host && near != setup.transport) {
    SOTTO_ASSIGN(setup.inside, context.backend(near));
  }
  return ok_status();
}

Result<RootSetup> plan_setup(Context& context, const CommConfig& config) {
  RootSetup setup;
  SOTTO_TRY(who_and_where(context, config, setup));
  SOTTO_TRY(check_rank(setup.request.rank, setup.request.size));
  const bool by_params = config.transport.empty() || config.transport == kAutoTransport;
  setup.transport = by_params ? context.params().transport : config.transport;
  setup.chosen = setup.transport == kAutoTransport;
  if (setup.chosen) {
    SOTTO_TRY(choose_transport(context, setup));
  } else if (const std::string host = context.in_host(setup.transport); !host.empty()) {
    SOTTO_ASSIGN(setup.on_host, context.backend(host));
  }
  if (setup.request.id.has_value()) {
    SOTTO_TRY(context.check_unused(*setup.request.id));
    SOTTO_ASSIGN(setup.backend, context.backend_for(*setup.request.id));
    if (setup.chosen) setup.transport = setup.backend->name();
    SOTTO_ASSIGN(const Backend* const wanted, context.rendezvous(setup.transport));
    if (wanted != setup.backend) {
      return invalid_argument("the unique id belongs to transport \"{}\", but \"{}\" was asked for",
                              setup.backend->name(), setup.transport);
    }
    return setup;
  }
  SOTTO_ASSIGN(setup.backend, context.rendezvous(setup.transport));
  if (setup.request.size == 1 && !setup.request.exchange) {
    SOTTO_ASSIGN(setup.request.id, context.engine()->drive([&](Driver&) {
      return setup.backend->make_unique_id(Reach::kProcess);  // another thread may make a comm
    }));
  }
  return setup;
}

// Ranks that meet through their launcher's process manager do so by an id of rank 0.
Status meet_by_manager(Engine& engine, RootSetup& setup) {
  if (!setup.manager.has_value()) return ok_status();
  const auto make = [&] {
    return engine.drive(
        [&](Driver&) { return setup.backend->make_unique_id(setup.request.reach); });
  };
  SOTTO_ASSIGN(setup.request.id,
               meet(*setup.manager, setup.request.rank, make, setup.request.deadline));
  if (setup.backend->knows(*setup.request.id)) return ok_status();
  return invalid_argument("rank {}: transport \"{}\" cannot join the ranks of {} with rank 0's id",
                          setup.request.rank, setup.transport, setup.manager->name);
}

Result<SetupRecord> own_record(const RootSetup& setup, const Params& params) {
  SetupRecord mine;
  mine.segment_bytes = static_cast<uint64_t>(params.segment_bytes);
  mine.silence_limit_ms = static_cast<uint32_t>(params.silence_limit_ms);
  mine.host = host_number(params.host_id, host_name(), boot_id());
  mine.hierarchy = static_cast<uint64_t>(*hierarchy_of(params.hierarchy));
  setup.transport.copy(mine.transport, sizeof mine.transport - 1);
  if (setup.alone) return mine;
  if (setup.on_host != nullptr) mine.shares = mine.host;
  if (setup.inside == nullptr) return mine;
  mine.place = setup.inside->place();
  if (setup.request.rank == 0) {
    SOTTO_ASSIGN(mine.inside, setup.inside->make_unique_id(Reach::kProcess));
  }
  return mine;
}

// The smallest number that any rank names counts; 0: a rank that names none.
template <class T>
void take_smallest(T& smallest, T named) {
  if (named != 0 && (smallest == 0 || named < smallest)) smallest = named;
}

// Versions, transports and hierarchies must be equal; of the segment sizes that ranks name the
// smallest wins.
Result<Agreement> agree(ControlPlane& control, const RootSetup& setup, const Params& params,
                        Driver& driver) {
  SOTTO_ASSIGN(const SetupRecord mine, own_record(setup, params));
  const std::string blob(reinterpret_cast<const char*>(&mine), sizeof mine);
  SOTTO_ASSIGN(const std::vector<std::string> all,
               control.all_gather("agreement", blob, driver, setup.request.deadline));
  Agreement agreement;
  for (size_t r = 0; r < all.size(); ++r) {
    SetupRecord theirs;
    if (all[r].size() != sizeof theirs) {
      return error(Code::kProtocol,
                   "rank {} sent {} of set-up data, {} expected: its library has another version",
                   r, counted(all[r].size(), "byte"), sizeof theirs);
    }
    std::memcpy(&theirs, all[r].data(), sizeof theirs);
    theirs.transport[sizeof theirs.transport - 1] = 0;  // another rank's bytes may have no end
    if (theirs.version != mine.version) {
      return error(Code::kProtocol, "rank {} speaks version {} of the set-up, rank {} version {}",
                   r, theirs.version, control.rank(), mine.version);
    }
    if (std::memcmp(theirs.transport, mine.transport, sizeof mine.transport) != 0) {
      return error(Code::kProtocol, "rank {} wants transport \"{:.15}\", rank {} \"{}\"", r,
                   theirs.transport, control.rank(), setup.transport);
    }
    if (theirs.hierarchy != mine.hierarchy) {
      return error(Code::kProtocol,
                   "rank {} has SOTTO_HIERARCHY={}, rank {} has {}; all need the same", r,
                   hierarchy_name(static_cast<Hierarchy>(theirs.hierarchy)), control.rank(),
                   params.hierarchy);
    }
    if (theirs.segment_bytes != 0 &&
        (theirs.segment_bytes < kLeastSegment || theirs.segment_bytes > kMostSegment)) {
      return error(Code::kProtocol, "rank {} wants messages of at most {}; allowed are {} to {}", r,
                   counted(theirs.segment_bytes, "byte"), kLeastSegment, kMostSegment);
    }
    take_smallest(agreement.segment_bytes, theirs.segment_bytes);
    take_smallest(agreement.silence_limit_ms, theirs.silence_limit_ms);
    agreement.places.push_back(theirs.place);
    agreement.hosts.push_back(theirs.host);
    agreement.shares.push_back(theirs.shares);
    if (r == 0) agreement.inside = theirs.inside;
  }
  const std::vector<uint64_t>& places = agreement.places;
  if (places[0] == 0 || std::ranges::count(places, places[0]) != std::ssize(places))
    agreement.inside.reset();
  agreement.hierarchy = static_cast<Hierarchy>(mine.hierarchy);
  SOTTO_TRY(make_levels(agreement.hierarchy, host_indices(agreement.hosts)).status());
  return agreement;
}

// All ranks are in one process: they go on through its memory and leave the sockets.
Status move_inside(RootSetup& setup, const UniqueId& id, std::unique_ptr<ControlPlane>& control,
                   Driver& driver) {
  setup.backend = setup.inside;
  setup.transport = setup.inside->name();
  setup.request.id = id;
  setup.request.exchange = nullptr;
  setup.request.address.clear();
  SOTTO_ASSIGN(std::unique_ptr<ControlPlane> inside, setup.backend->join(setup.request, driver));
  control->leave(setup.request.deadline);
  control = std::move(inside);
  return ok_status();
}

// Ranks that do not come may be ranks that there are not.
Status name_source(const RootSetup& setup, const Status& status) {
  if (status.code() != Code::kTimeout || setup.source.empty()) return status;
  return error(status.code(), "{}; the environment says that the group has {} ({})", status.text(),
               counted(setup.request.size, "rank"), setup.source);
}

// A failure of this rank is the failure of the others, which wait for it.
Status tell(ControlPlane& control, const Status& status) {
  if (!status.ok()) control.fail({status.code(), control.rank(), status.text()});
  return status;
}

// Rendezvous, agreement, control plane of the comm.
Result<std::unique_ptr<ControlPlane>> rendezvous(Context& context, RootSetup& setup, RootComm& root,
                                                 Driver& driver) {
  SOTTO_ASSIGN(std::unique_ptr<ControlPlane> control, setup.backend->join(setup.request, driver));
  Result<Agreement> agreement = agree(*control, setup, context.params(), driver);
  SOTTO_TRY(tell(*control, agreement.status()));
  control->set_silence_limit(agreement->silence_limit_ms);
  root.sizes.segment_bytes = agreement->segment_bytes;
  root.hosts = std::move(agreement->hosts);
  root.hierarchy = agreement->hierarchy;
  if (agreement->inside) {
    const Status moved = move_inside(setup, *agreement->inside, control, driver);
    SOTTO_TRY(tell(*control, moved));
  } else {
    setup.places = std::move(agreement->places);
    setup.shares = std::move(agreement->shares);
  }
  root.transport = setup.transport;
  return control;
}

// Whether two ranks have the same number in `groups` and are not nearer to each other. nearer: by
// rank; 0, or empty: to none. All ranks answer alike.
bool any_together(const std::vector<uint64_t>& groups, const std::vector<uint64_t>& nearer) {
  std::vector<std::pair<uint64_t, uint64_t>> ranks;
  for (size_t r = 0; r < groups.size(); ++r) {
    if (groups[r] != 0) ranks.emplace_back(groups[r], nearer.empty() ? 0 : nearer[r]);
  }
  std::ranges::sort(ranks);
  return std::ranges::adjacent_find(ranks, [](const auto& a, const auto& b) {
           return a.first == b.first && (a.second == 0 || a.second != b.second);
         }) != ranks.end();
}

// Takes those out of `rest` that are together with this rank, itself among them.
std::vector<int32_t> take_together(const std::vector<uint64_t>& groups, int32_t rank,
                                   std::vector<int32_t>& rest) {
  const uint64_t own = groups[static_cast<size_t>(rank)];
  std::vector<int32_t> together;
  std::erase_if(rest, [&](int32_t r) {
    const bool here = own != 0 && groups[static_cast<size_t>(r)] == own;
    if (here) together.push_back(r);
    return here;
  });
  return together;
}

// What links ranks so near to each other. A rank that has none of them takes part in the set-up of
// the others' links all the same.
Result<Backend*> link_of(Context& context, Backend* own, Reach distance) {
  if (own != nullptr) return own;
  SOTTO_ASSIGN(const std::string name, context.auto_transport(distance));
  return context.backend(name);
}

// Those of the peers with whom operations in two levels have no messages, whether or not the group
// is set to levels: a configuration can name them too. Every two hosts keep a pair that is
// connected at once, so that the set-up tells when they do not reach each other.
std::vector<int32_t> lazy_of(const RootComm& root, int32_t rank, std::span<const int32_t> peers) {
  std::vector<int32_t> lazy;
  const Hierarchy kind = root.hierarchy == Hierarchy::kFlat ? Hierarchy::kAuto : root.hierarchy;
  const Result<Levels> levels = make_levels(kind, host_indices(root.hosts));
  if (!levels.ok() || !levels->several()) return lazy;
  std::ranges::copy_if(peers, std::back_inserter(lazy),
                       [&](int32_t peer) { return !levels->linked(rank, peer); });
  return lazy;
}

// One link of the group: a transport and the ranks that this one reaches by it. Those that it does
// not reach are left in `rest`.
Status add_link(const RootSetup& setup, Backend& backend, std::vector<int32_t> peers,
                std::vector<int32_t>& rest, RootComm& root, Driver& driver) {
  ControlPlane& control = *root.channel->control();
  const std::vector<int32_t> lazy = lazy_of(root, control.rank(), peers);
  SOTTO_ASSIGN(
      std::unique_ptr<Transport> transport,
      backend.connect(control, {peers, lazy}, *root.channel, driver, setup.request.deadline));
  std::erase_if(peers, [&](int32_t rank) {
    const bool reached = transport->reaches(rank);
    if (!reached) rest.push_back(rank);
    return !reached;
  });
  log(LogLevel::kDebug, "rank {}: {} links it with {}", control.rank(), backend.name(),
      counted(peers.size(), "rank"));
  root.channel->attach(std::move(transport), peers);
  return ok_status();
}

// The transport that carries all messages of this rank, wherever ranks have met; "auto": several
// do.
std::string carrier_of(const RootComm& root) {
  const ControlPlane& control = *root.channel->control();
  std::set<std::string> names;
  for (const int32_t rank : all_ranks(control)) {
    if (rank != control.rank()) names.insert(root.channel->links().to(rank).transport->caps().name);
  }
  if (names.empty()) return root.transport;
  return names.size() == 1 ? *names.begin() : std::string(kAutoTransport);
}

// Ranks of one place are linked inside it, other ranks of one host inside that, and all that are
// left by the transport that reaches ranks anywhere. All ranks make the same links, also where they
// have no peers.
Status connect(const RootSetup& setup, void* native_comm, RootComm& root, Driver& driver) {
  const ControlPlane& control = *root.channel->control();
  const int32_t rank = control.rank();
  SOTTO_ASSIGN(Backend * between, root.context->backend(setup.transport));
  if (native_comm != nullptr) SOTTO_TRY(between->adopt(native_comm));
  if (between == setup.on_host) {
    SOTTO_ASSIGN(between, root.context->rendezvous(setup.transport));
  }
  std::vector<int32_t> rest = all_ranks(control);
  if (any_together(setup.places, {})) {
    SOTTO_ASSIGN(Backend* const inside, link_of(*root.context, setup.inside, Reach::kProcess));
    SOTTO_TRY(
        add_link(setup, *inside, take_together(setup.places, rank, rest), rest, root, driver));
  }
  if (any_together(setup.shares, setup.places)) {
    SOTTO_ASSIGN(Backend* const on_host, link_of(*root.context, setup.on_host, Reach::kHost));
    SOTTO_TRY(
        add_link(setup, *on_host, take_together(setup.shares, rank, rest), rest, root, driver));
  }
  SOTTO_TRY(add_link(setup, *between, rest, rest, root, driver));
  std::vector<const TransportCaps*> transports;
  for (const Link& link : root.channel->links().all())
    transports.push_back(&link.transport->caps());
  if (setup.chosen) root.transport = carrier_of(root);
  const uint64_t named = root.sizes.segment_bytes;
  root.sizes = common_sizes(transports);
  if (named != 0) root.sizes.segment_bytes = named;
  root.sizes.by_order = std::ranges::any_of(root.channel->links().all(),
                                            [](const Link& link) { return link.queue != nullptr; });
  return ok_status();
}

}  // namespace

Result<std::shared_ptr<Comm>> Comm::create(const std::shared_ptr<Context>& context,
                                           CommConfig config) {
  auto root = std::make_shared<RootComm>();
  root->context = context;
  root->timeout_us = config.timeout_us == 0 ? context->params().timeout_us : config.timeout_us;
  if (root->timeout_us == 0) root->timeout_us = Params().timeout_us;  // the environment says 0
  SOTTO_ASSIGN(RootSetup setup, plan_setup(*context, config));
  Engine& engine = *context->engine();
  setup.request.deadline = Deadline::in_us(engine.clock(), root->timeout_us);
  SOTTO_TRY(meet_by_manager(engine, setup));
  if (config.id && setup.request.size > 1) SOTTO_TRY(context->meet_with(*config.id));
  SOTTO_TRY(engine.drive([&](Driver& driver) -> Status {
    Result<std::unique_ptr<ControlPlane>> joined = rendezvous(*context, setup, *root, driver);
    if (config.id) context->note_use(*config.id, joined.ok());
    if (!joined.ok()) return name_source(setup, joined.status());
    std::unique_ptr<ControlPlane> control = joined.take();
    root->channel = engine.make_channel();
    root->channel->attach(std::move(control));
    return tell(*root->channel->control(), connect(setup, config.native_comm, *root, driver));
  }));
  const ControlPlane& control = *root->channel->control();
  std::vector<int32_t> ranks(static_cast<size_t>(control.size()));
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int32_t>(r);
  const int32_t rank = control.rank();
  const uint64_t token = control.token();
  const std::shared_ptr<Comm> made(new Comm(std::move(root), std::move(ranks), rank, token));
  SOTTO_TRY(made->join(OpKind::kCommCreate));
  engine.drive([&](Driver& driver) {
    ControlPlane& control_plane = *made->root_->channel->control();
    control_plane.established();
    made->root_->standing.attach(control_plane, driver.clock());
  });
  return made;
}

}  // namespace sotto
