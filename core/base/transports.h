// The list of transports (transports.def): names, and what "auto" and contexts know of each.
#pragma once

#include <cstdint>
#include <string_view>

namespace sotto {

// The ranks that a transport connects: threads of one process, processes of one host, or ranks
// anywhere.
enum class Reach : uint8_t { kProcess, kHost, kNetwork };

// A row of the table, whose words are explained there.
struct TransportRow {
  std::string_view name;
  int32_t priority = 0;
  Reach reach = Reach::kNetwork;
  std::string_view rendezvous;
  std::string_view in_host;
  bool blocking = false;
};
inline constexpr TransportRow kTransports[] = {
#define SOTTO_TRANSPORT(name, priority, reach, rendezvous, in_host, blocking) \
  {#name, priority, Reach::reach, #rendezvous, #in_host, blocking},
#include "core/base/transports.def"
};
// The row of a name; a name that is none has itself as rendezvous and inside hosts, and is taken by
// name only.
constexpr TransportRow transport_row(std::string_view name) {
  for (const TransportRow& row : kTransports) {
    if (row.name == name) return row;
  }
  return {.name = name, .rendezvous = name, .in_host = name};
}

inline constexpr std::string_view kAutoTransport = "auto";
// What a transport may be set to, in the order of kTransportWords.
inline constexpr std::string_view kTransportChoices[] = {
    kAutoTransport,
#define SOTTO_TRANSPORT(name, ...) #name,
#include "core/base/transports.def"
};
inline constexpr std::string_view kTransportWords = "auto"
#define SOTTO_TRANSPORT(name, ...) "|" #name
#include "core/base/transports.def"
    ;

}  // namespace sotto
