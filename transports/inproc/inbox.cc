#include "transports/inproc/inbox.h"

namespace sotto::inproc {
namespace {

uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v;
  h *= 0x9e3779b97f4a7c15u;
  return h ^ (h >> 29);
}

uint64_t hash_of(const OpKey& key) { return mix(mix(0x5077u, key.comm), key.number); }
uint64_t hash_of(const Transfer& t, int32_t source) {
  return mix(mix(hash_of(t.op->key), static_cast<uint64_t>(source)),
             uint64_t{t.round} << 32 | t.segment);
}

}  // namespace

void TransferQueue::push(Transfer* t) {
  t->next = nullptr;
  (head_ == nullptr ? head_ : tail_->next) = t;
  tail_ = t;
}

Transfer* TransferQueue::pop() {
  Transfer* t = head_;
  if (t != nullptr) head_ = t->next;
  return t;
}

Transfer* TransferQueue::take_all() {
  Transfer* all = head_;
  head_ = tail_ = nullptr;
  return all;
}

void TransferTable::insert(Transfer* t, int32_t source) {
  if (count_ == buckets_.size()) grow();
  // At the end of its chain: equal keys, which a correct caller never has, would match in order.
  Transfer** link = &buckets_[hash_of(*t, source) & (buckets_.size() - 1)];
  while (*link != nullptr) link = &(*link)->next;
  t->next = nullptr;
  *link = t;
  ++count_;
}

Transfer* TransferTable::match(const Transfer& t, int32_t source) {
  Transfer** link = &buckets_[hash_of(t, source) & (buckets_.size() - 1)];
  for (; *link != nullptr; link = &(*link)->next) {
    Transfer* other = *link;
    const int32_t other_source = other->is_send ? source_of(*other) : other->peer;
    if (other->is_send == t.is_send || other_source != source || other->round != t.round ||
        other->segment != t.segment || !(other->op->key == t.op->key) ||
        !(other->op->signature == t.op->signature)) {
      continue;
    }
    *link = other->next;
    --count_;
    return other;
  }
  return nullptr;
}

void TransferTable::grow() {
  std::vector<Transfer*> old(buckets_.size() * 2);
  old.swap(buckets_);
  for (Transfer* head : old) {
    while (head != nullptr) {
      Transfer* next = head->next;
      const int32_t source = head->is_send ? source_of(*head) : head->peer;
      Transfer** link = &buckets_[hash_of(*head, source) & (buckets_.size() - 1)];
      while (*link != nullptr) link = &(*link)->next;
      head->next = nullptr;
      *link = head;
      head = next;
    }
  }
}

OpEntry* OpEntryTable::find(const OpKey& key) const {
  OpEntry* entry = buckets_[hash_of(key) % kBuckets];
  while (entry != nullptr && !(entry->key == key)) entry = entry->next;
  return entry;
}

OpEntry& OpEntryTable::get(const OpKey& key) {
  if (OpEntry* entry = find(key)) return *entry;
  if (free_.empty()) {
    all_.push_back(std::make_unique<OpEntry>());
    all_.back()->open_recvs.resize(ranks_);
    free_.reserve(all_.size());
    free_.push_back(all_.back().get());
  }
  OpEntry* entry = free_.back();
  free_.pop_back();
  entry->key = key;
  OpEntry*& head = buckets_[hash_of(key) % kBuckets];
  entry->next = head;
  head = entry;
  return *entry;
}

void OpEntryTable::drop_if_idle(OpEntry& entry) {
  if (entry.posted || entry.heard_from >= 0 || entry.waiting_sends != 0) return;
  OpEntry** link = &buckets_[hash_of(entry.key) % kBuckets];
  while (*link != &entry) link = &(*link)->next;
  *link = entry.next;
  entry.next = nullptr;
  std::fill(entry.open_recvs.begin(), entry.open_recvs.end(), 0u);
  free_.push_back(&entry);
}

Status Inbox::check_signature(const OpDescriptor& op, int32_t from) {
  OpEntry& entry = ops.get(op.key);
  if (entry.posted) {
    if (entry.signature == op.signature) return ok_status();
    return Status(Code::kProtocol,
                  describe_mismatch(op.key, owner, entry.signature, from, op.signature));
  }
  if (entry.heard_from < 0) {
    entry.heard_from = from;
    entry.heard = op.signature;
    return ok_status();
  }
  if (entry.heard == op.signature) return ok_status();
  return Status(Code::kProtocol,
                describe_mismatch(op.key, entry.heard_from, entry.heard, from, op.signature));
}

void Inbox::report(int32_t peer, const Status& status) {
  if (failure) return;
  failed_peer = peer;
  failure = status;
}

}  // namespace sotto::inproc
