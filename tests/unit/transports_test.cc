// The list of transports: its rows, and which of them "auto" chooses.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/transports.h"
#include "core/cpu/cpu_device.h"
#include "core/group/context.h"
#include "transports/nccl/caps.h"

namespace sotto {
namespace {

std::shared_ptr<Context> context_with(const std::vector<TransportRow>& transports) {
  ContextOptions options;
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kScalar);
  options.progress_thread = false;
  for (const TransportRow& row : transports)
    options.backends[std::string(row.name)] = {nullptr, row};
  return std::make_shared<Context>(std::move(options));
}

TEST(Transports, TheListNamesWhatMayBeChosen) {
  EXPECT_EQ(kTransportWords, "auto|inproc|nccl|shm|tcp|ucx");
  std::string words;
  for (const std::string_view choice : kTransportChoices)
    words += (words.empty() ? "" : "|") + std::string(choice);
  EXPECT_EQ(words, kTransportWords);
  EXPECT_TRUE(std::ranges::is_sorted(kTransports, {}, &TransportRow::name));
}

TEST(Transports, ARendezvousIsOneOfARowWithItsOwn) {
  for (const TransportRow& row : kTransports) {
    SCOPED_TRACE(row.name);
    EXPECT_EQ(transport_row(row.name).priority, row.priority);
    const TransportRow other = transport_row(row.rendezvous);
    EXPECT_EQ(other.rendezvous, row.rendezvous);
    EXPECT_GE(other.reach, row.reach);
    EXPECT_TRUE(std::ranges::count(kTransports, row.rendezvous, &TransportRow::name) == 1);
  }
}

TEST(Transports, AutoIsTheHighestPriorityThatReachesAllRanks) {
  const auto context = context_with({std::begin(kTransports), std::end(kTransports)});
  EXPECT_EQ(context->auto_transport(Reach::kProcess).take(), "inproc");
  EXPECT_EQ(context->auto_transport(Reach::kNetwork).take(), "tcp");
}

TEST(Transports, AutoTakesWhatThisBuildHas) {
  EXPECT_EQ(context_with({transport_row("tcp")})->auto_transport(Reach::kProcess).take(), "tcp");
  const auto far = context_with({transport_row("inproc"), transport_row("nccl")});
  EXPECT_EQ(far->auto_transport(Reach::kNetwork).status().code(), Code::kUnsupported);
}

TEST(Transports, InsideAHostIsWhatIsForHosts) {
  const auto all = context_with({std::begin(kTransports), std::end(kTransports)});
  EXPECT_EQ(all->in_host("shm"), "shm");
  EXPECT_EQ(all->in_host("ucx"), "shm");
  for (const char* name : {"tcp", "nccl", "inproc", "none"}) EXPECT_EQ(all->in_host(name), "");
  EXPECT_EQ(context_with({transport_row("ucx"), transport_row("tcp")})->in_host("ucx"), "");
}

TEST(Transports, ANameOutsideTheListIsTakenByNameOnly) {
  const TransportRow row = transport_row("ordered");
  EXPECT_EQ(row.name, "ordered");
  EXPECT_EQ(row.rendezvous, "ordered");
  EXPECT_EQ(row.in_host, "ordered");
  EXPECT_EQ(row.priority, 0);
}

// Sizes of the transport that cuts more, whichever comes first: every plan of a comm has one kind.
TEST(Transports, SizesSuitAllLinks) {
  const TransportCaps tcp{.segment_bytes = 128 * 1024}, inside, nccl = nccl::caps_of(0);
  const auto sizes_of = [](std::vector<const TransportCaps*> links) {
    const MessageSizes sizes = common_sizes(links);
    return std::pair(sizes.segment_bytes, sizes.held);
  };
  EXPECT_EQ(sizes_of({&nccl}), std::pair(uint64_t{0}, nccl.held));
  EXPECT_EQ(nccl.held.count, 1u);
  const auto cut = std::pair(tcp.segment_bytes, tcp.held);
  for (const auto& links : {std::vector{&tcp},
                            {&tcp, &inside},
                            {&inside, &tcp},
                            {&nccl, &tcp},
                            {&tcp, &nccl},
                            {&nccl, &inside, &tcp}})
    EXPECT_EQ(sizes_of(links), cut);
}

}  // namespace
}  // namespace sotto
