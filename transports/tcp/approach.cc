#include "transports/tcp/approach.h"

#include <algorithm>
#include <utility>

namespace sotto::tcp {

Approach::Approach(Reactor& reactor, const wire::Hello& own, int32_t peer, uint32_t number,
                   std::vector<Endpoint> endpoints, Events events)
    : reactor_(reactor),
      own_(own),
      peer_(peer),
      number_(number),
      endpoints_(std::move(endpoints)),
      events_(std::move(events)) {
  try_next();
}

std::string Approach::progress() const {
  if (done_) return "";
  std::string text = answers_;
  const auto append = [&](const std::string& more) {
    text += (text.empty() || more.empty() ? "" : ", ") + more;
  };
  for (const auto& one : greetings_)
    if (one->stream().open()) append(one->stream().name() + ": connected, no hello");
  if (!seeks_) return text;
  const std::string tried = connector_->tried();
  append(tried.empty() ? endpoint_text(endpoints_[begun_]) + ": no answer" : tried);
  return text;
}

bool Approach::waits() const {
  return seeks_ ||
         std::ranges::any_of(greetings_, [](const auto& one) { return one->stream().open(); });
}

void Approach::try_next() {
  timer_.reset();
  if (done_ || seeks_ || begun_ == endpoints_.size()) return;
  seeks_ = true;
  const auto first = endpoints_.begin() + static_cast<std::ptrdiff_t>(begun_);
  connector_ = std::make_unique<Connector>(
      reactor_, std::vector<Endpoint>(first, endpoints_.end()), false,
      [this](int fd, std::string name) { adopt(fd, std::move(name)); },
      [this](const Status& why) {
        seeks_ = false;
        begun_ = endpoints_.size();
        note(connector_->tried());
        settle(why);
      });
}

void Approach::adopt(int fd, std::string name) {
  if (greetings_.empty()) events_.adopted();
  seeks_ = false;
  begun_ += connector_->position() + 1;
  note(connector_->tried());
  auto handshake = std::make_unique<Handshake>(*this, own_, peer_, number_, true);
  auto stream = FrameStream::make(reactor_, fd, std::move(name), *handshake);
  if (!stream.ok()) {
    settle(stream.status());
    return;
  }
  if (begun_ < endpoints_.size()) timer_ = reactor_.after(kAttemptMs, [this] { try_next(); });
  greetings_.push_back(std::move(handshake));
  greetings_.back()->start(stream.take());
}

// An address is not the peer's.
void Approach::settle(const Status& why) {
  if (done_) return;
  try_next();
  if (waits()) return;
  done_ = true;
  events_.failed(endpoints_.size() == 1 ? why
                                        : error(why.code(), "cannot connect to {}", answers_));
}

void Approach::note(const std::string& answers) {
  answers_ += (answers_.empty() || answers.empty() ? "" : ", ") + answers;
}

Status Approach::on_answer(Handshake& handshake, const wire::Hello& hello) {
  SOTTO_TRY(events_.check(hello, handshake.stream().name()));
  done_ = true;
  timer_.reset();
  connector_.reset();
  seeks_ = false;
  std::unique_ptr<Handshake> found;
  for (auto& one : greetings_) {
    if (one.get() == &handshake)
      found = std::move(one);
    else
      one->close();
  }
  std::erase(greetings_, nullptr);
  events_.greeted(std::move(found));
  return {};
}

void Approach::on_handshake_broken(Handshake& handshake, const Status& why) {
  if (done_) {
    events_.failed(why);
    return;
  }
  const std::string& where = handshake.stream().name();
  note(why.text().starts_with(where) ? why.text() : fmt::format("{}: {}", where, why.text()));
  settle(why);
}

}  // namespace sotto::tcp
