// Predictions without a group: how much of their time averages would cost, and what they need.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/iface/device.h"
#include "core/iface/transport.h"
#include "core/predict/request.h"

namespace sotto {

// JSON, as sotto_predict_report documents it. device: what rates are measured on, a synchronous
// one. transport: what ranks would be reached by, one that matches messages by their keys; its
// messages are as large as the request says, if it does.
Result<std::string> predict_report(const PredictRequest& request, std::shared_ptr<Device> device,
                                   TransportCaps transport);

}  // namespace sotto
