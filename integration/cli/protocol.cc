#include "integration/cli/protocol.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "integration/cli/waiting.h"

namespace sotto_cli {
namespace {

constexpr uint32_t kLargestBody = uint32_t{1} << 26;  // bytes
constexpr int32_t kFirstKind = static_cast<int32_t>(FrameKind::kHeartbeat);
constexpr int32_t kLastKind = static_cast<int32_t>(FrameKind::kClosed);

struct Header {
  int32_t kind, rank, value;
  uint32_t size;
};

template <class T>
void put_number(std::string& text, T number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void put_string(std::string& text, const std::string& word) {
  put_number(text, static_cast<uint32_t>(word.size()));
  text += word;
}

void put_strings(std::string& text, const std::vector<std::string>& words) {
  put_number(text, static_cast<uint32_t>(words.size()));
  for (const std::string& word : words) put_string(text, word);
}

class Unpacker {
 public:
  explicit Unpacker(std::string_view text) : text_(text) {}

  template <class T>
  T number() {
    T value{};
    if (text_.size() < sizeof value) {
      good_ = false;
    } else {
      std::memcpy(&value, text_.data(), sizeof value);
      text_.remove_prefix(sizeof value);
    }
    return value;
  }
  std::string string() {
    const auto size = number<uint32_t>();
    if (size > text_.size()) good_ = false;
    if (!good_) return {};
    std::string word(text_.substr(0, size));
    text_.remove_prefix(size);
    return word;
  }
  std::vector<std::string> strings() {
    std::vector<std::string> words;
    for (auto n = number<uint32_t>(); good_ && n > 0; --n) words.push_back(string());
    return words;
  }
  bool whole() const { return good_ && text_.empty(); }

 private:
  std::string_view text_;
  bool good_ = true;
};

}  // namespace

std::string pack(const Job& job) {
  std::string text;
  for (const int32_t number : {job.group.first, job.group.count, job.group.world})
    put_number(text, number);
  put_strings(text, job.group.words);
  put_strings(text, job.group.environment);
  put_string(text, job.folder);
  put_string(text, job.host);
  put_number(text, static_cast<uint8_t>(job.has_rendezvous));
  put_number(text, static_cast<uint8_t>(job.has_others));
  put_number(text, job.silence_ns);
  return text;
}

bool unpack(std::string_view text, Job& job) {
  Unpacker from(text);
  job.group.first = from.number<int32_t>();
  job.group.count = from.number<int32_t>();
  job.group.world = from.number<int32_t>();
  job.group.words = from.strings();
  job.group.environment = from.strings();
  job.folder = from.string();
  job.host = from.string();
  job.has_rendezvous = from.number<uint8_t>() != 0;
  job.has_others = from.number<uint8_t>() != 0;
  job.silence_ns = from.number<int64_t>();
  return from.whole() && job.group.first >= 0 && job.group.count > 0 &&
         job.group.first <= job.group.world - job.group.count && !job.group.words.empty() &&
         job.silence_ns > 0;
}

bool FrameReader::next(Frame& frame) {
  Header header{};
  const std::string_view rest = std::string_view(buffer_).substr(used_);
  if (!damaged_ && rest.size() >= sizeof header) {
    std::memcpy(&header, rest.data(), sizeof header);
    damaged_ = header.kind < kFirstKind || header.kind > kLastKind || header.size > kLargestBody;
  }
  if (damaged_ || rest.size() < sizeof header || rest.size() - sizeof header < header.size) {
    buffer_.erase(0, used_);
    used_ = 0;
    return false;
  }
  frame.kind = static_cast<FrameKind>(header.kind);
  frame.rank = header.rank;
  frame.value = header.value;
  frame.body = rest.substr(sizeof header, header.size);
  used_ += sizeof header + header.size;
  return true;
}

void FrameWriter::put(std::string_view bytes) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (broken_ || fd_ < 0) return;
  queue_ += bytes;
  write_queue();
}

void FrameWriter::send(const Frame& frame) {
  const Header header{static_cast<int32_t>(frame.kind), frame.rank, frame.value,
                      static_cast<uint32_t>(frame.body.size())};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += frame.body;
  put(bytes);
}

void FrameWriter::beat() {
  if (queued() == 0) send({});
}

void FrameWriter::flush() {
  const std::lock_guard<std::mutex> guard(lock_);
  write_queue();
}

void FrameWriter::write_queue() {
  size_t done = 0;
  while (fd_ >= 0 && !broken_ && done < queue_.size()) {
    const char* const from = queue_.data() + done;
    ssize_t n = ::send(fd_, from, queue_.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == ENOTSOCK) n = write(fd_, from, queue_.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      broken_ = true;
    }
  }
  queue_.erase(0, broken_ ? queue_.size() : done);
}

void FrameWriter::close() {
  const std::lock_guard<std::mutex> guard(lock_);
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  queue_.clear();
}

size_t FrameWriter::queued() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return queue_.size();
}

bool FrameWriter::broken() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return broken_;
}

Heartbeats::~Heartbeats() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Heartbeats::add(std::shared_ptr<FrameWriter> writer) {
  const std::lock_guard<std::mutex> guard(lock_);
  writers_.push_back(std::move(writer));
  if (!thread_.joinable()) thread_ = std::thread(&Heartbeats::run, this);
}

void Heartbeats::pause(bool paused) {
  const std::lock_guard<std::mutex> guard(lock_);
  paused_ = paused;
}

void Heartbeats::run() {
  std::unique_lock<std::mutex> guard(lock_);
  while (!stop_) {
    if (!paused_) {
      for (const auto& writer : writers_) writer->beat();
    }
    wake_.wait_for(guard, std::chrono::nanoseconds(interval_ns_));
  }
}

int64_t heartbeat_interval_ns(int64_t silence_ns) { return std::min(5 * kNsPerS, silence_ns / 4); }

}  // namespace sotto_cli
