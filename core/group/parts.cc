#include "core/group/parts.h"

namespace sotto {

void CommCounters::add(const OpTotals& totals) {
  payload_bytes_planned += totals.payload_bytes_planned.load(std::memory_order_relaxed);
  header_bytes_planned += totals.header_bytes_planned.load(std::memory_order_relaxed);
  kernel_ns += totals.kernel_ns.load(std::memory_order_relaxed);
  ops_completed += totals.completed.load(std::memory_order_relaxed);
}

void Parts::add(uint64_t epoch, std::shared_ptr<const OpTotals> totals) {
  const std::lock_guard lock(mutex_);
  there_[epoch] = std::move(totals);
  ++made_;
}

void Parts::end(uint64_t epoch, const LinkTable& links, std::span<const int32_t> ranks) {
  const std::lock_guard lock(mutex_);
  const auto part = there_.find(epoch);
  if (part == there_.end()) return;
  done_.add(*part->second);
  for (const int32_t rank : ranks) moved_[rank] += links.counters(epoch, rank);
  there_.erase(part);
}

uint64_t Parts::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

TransferCounters Parts::moved(const LinkTable& links, int32_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto ended = moved_.find(rank);
  TransferCounters sum = ended == moved_.end() ? TransferCounters{} : ended->second;
  for (const auto& [epoch, totals] : there_) sum += links.counters(epoch, rank);
  return sum;
}

CommCounters Parts::done() const {
  const std::lock_guard lock(mutex_);
  CommCounters sum = done_;
  for (const auto& [epoch, totals] : there_) sum.add(*totals);
  return sum;
}

}  // namespace sotto
