// The channels of an engine, and what they share. Driver.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine/channel.h"
#include "core/engine/ordered_issue.h"

namespace sotto {

class ChannelList {
 public:
  void add(Channel& channel) { channels_.push_back(&channel); }
  void remove(const Channel& channel) { std::erase(channels_, &channel); }

  std::vector<Channel*>::const_iterator begin() const { return channels_.begin(); }
  std::vector<Channel*>::const_iterator end() const { return channels_.end(); }
  // For loops that may make or destroy channels.
  std::vector<Channel*> copy() const { return channels_; }

  // The lowest that no channel has.
  uint32_t free_number() const {
    uint32_t number = 0;
    const auto taken = [&](const Channel* channel) { return channel->number() == number; };
    while (std::ranges::any_of(channels_, taken)) ++number;
    return number;
  }
  // The groups of all links whose messages are calls of lanes.
  const std::shared_ptr<OrderedIssue>& lane_groups() const { return lane_groups_; }

 private:
  std::vector<Channel*> channels_;
  const std::shared_ptr<OrderedIssue> lane_groups_ = std::make_shared<OrderedIssue>();
};

}  // namespace sotto
