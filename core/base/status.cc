#include "core/base/status.h"

#include <exception>
#include <new>

namespace sotto {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk: return "OK";
    case Code::kInProgress: return "IN_PROGRESS";
    case Code::kInvalidArgument: return "INVALID_ARGUMENT";
    case Code::kInvalidState: return "INVALID_STATE";
    case Code::kUnsupported: return "UNSUPPORTED";
    case Code::kOutOfMemory: return "OUT_OF_MEMORY";
    case Code::kBusy: return "BUSY";
    case Code::kTimeout: return "TIMEOUT";
    case Code::kPeerLost: return "PEER_LOST";
    case Code::kAborted: return "ABORTED";
    case Code::kProtocol: return "PROTOCOL";
    case Code::kTransport: return "TRANSPORT";
    case Code::kDevice: return "DEVICE";
    case Code::kInternal: return "INTERNAL";
    case Code::kNonfinite: return "NONFINITE";
    case Code::kCancelled: return "CANCELLED";
  }
  return "UNKNOWN";
}

Status::Status(Code code, std::string text) : code_(code) {
  if (code != Code::kOk) text_ = std::make_shared<const std::string>(std::move(text));
}

const std::string& Status::text() const {
  // Never destroyed: usable until the process ends.
  static const std::string* const empty = new std::string;
  return text_ ? *text_ : *empty;
}

Status Status::with_prefix(std::string_view prefix) const {
  if (ok()) return *this;
  return Status(code_, fmt::format("{}: {}", prefix, text()));
}

Status status_of_exception() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  } catch (...) {
    return Status(Code::kInternal, "exception of unknown type");
  }
}

}  // namespace sotto
