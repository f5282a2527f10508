// What differs between codecs: how ranks come to a mean, and what its state and its errors are
// called. Most send every chunk to its server, which adds up and encodes again: for these it is how
// a run of elements is encoded, added up, decoded and taken back. Plans, state and texts ask it;
// what needs no code stands in the row of the codec (CodecRow). docs/adding-a-codec.md adds one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/codec/compressed_request.h"

namespace sotto {

// A run of the own chunk that a server adds up and encodes again.
struct ServerRun {
  std::vector<Piece> pieces;  // flat counts in the server's own flat space
  OperandRef rows;            // payload of every rank, in units
  uint64_t shift = 0;         // from the server's flat space to the whole one, elements
  uint64_t scales = 0;        // in one message of the section
  OperandRef messages;        // of the section, of all ranks
  OperandRef sums;            // block sums, written
  OperandRef flags;           // word of the section
};

class ServerCoding;

class Coding {
 public:
  // Emits the mean over ranks. Uses rounds from builder.next_round() on.
  virtual CompressedMean mean(PlanBuilder& b, const CompressedMeanRequest& r) const = 0;
  // emit_own_payload() of compressed.h.
  virtual CompressedSlots own_payload(PlanBuilder& b, const CompressedMeanRequest& r) const = 0;
  // What servers do; null: it has none.
  virtual const ServerCoding* servers() const { return nullptr; }

  // What a residual is the residual of, as in ErrorFeedback::scale.
  virtual std::string state_name(const CodecSettings& codec) const = 0;
  // Values that have no code, for texts of errors.
  virtual std::string_view refused() const = 0;

 protected:
  ~Coding() = default;
};

class ServerCoding : public Coding {
 public:
  CompressedMean mean(PlanBuilder& b, const CompressedMeanRequest& r) const final;
  CompressedSlots own_payload(PlanBuilder& b, const CompressedMeanRequest& r) const final;
  const ServerCoding* servers() const final { return this; }
  // Emits the encoder of pieces of the tensors `r.in`, and what takes it back if there is a
  // residual.
  virtual void encode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
                      std::vector<Piece> pieces, const EncodeTarget& to) const = 0;
  // Emits the server of a run, which writes `r.slots.bits` and the next residual.
  virtual void serve(PlanBuilder& b, const CompressedRequest& r, ServerRun run,
                     const KernelOptions& options) const = 0;
  // Emits the decoder of pieces of the result into the tensors `r.out`.
  virtual void decode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
                      std::vector<Piece> pieces, const KernelOptions& options) const = 0;
  // Emits what comes after the undo steps of all encoders.
  virtual void undo(PlanBuilder&, const CompressedRequest&) const {}

 protected:
  ~ServerCoding() = default;
};

// Lives as long as the process.
const Coding& coding_of(CodecKind kind);

// Footprint of a payload, by flat elements.
OperandRef payload_operand(uint32_t slot, Access access, PayloadUnit unit, uint64_t base = 0,
                           uint64_t offset = 0);

}  // namespace sotto
