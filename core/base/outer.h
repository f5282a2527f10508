// The words of outer optimizers: CO2, SlowMo, DiLoCo and their family (specification co2-overlap,
// sections 3 and 4).
#pragma once

#include <cstdint>

namespace sotto {

// What ranks average.
enum class OuterPayload : uint8_t {
  kDelta = 1,   // the anchor less the live parameters
  kParams = 2,  // the live parameters
};

enum class OuterRule : uint8_t { kHeavyBall = 1, kNesterov = 2, kNone = 3 };

// What is taken for the pseudo-gradient when an average is a period late (section 4.2).
enum class OuterForm : uint8_t { kDelta = 1, kAnchorDiff = 2 };

// What a late pseudo-gradient is divided by (section 4.3).
enum class OuterPenalty : uint8_t {
  kNone = 1,
  kConst = 2,
  kGapRel = 3,
  kGapEma = 4,
  kGapInner = 5
};
enum class OuterGranularity : uint8_t { kGlobal = 1, kTensor = 2, kElement = 3 };

// Limit of the momentum (section 4.4).
enum class OuterClip : uint8_t { kNone = 1, kCoordinate = 2, kNorm = 3, kRms = 4 };
enum class OuterClipUnits : uint8_t { kParam = 1, kGrad = 2 };

// What live parameters become when an average is consumed (section 3).
enum class OuterMerge : uint8_t { kReset = 1, kLerp = 2, kAddProgress = 3, kPull = 4 };

// What becomes of a rank whose payload is not finite (section 14).
enum class OuterNonfinite : uint8_t { kSkipRank = 1, kError = 2, kPass = 3 };

// What every step averages before outer steps begin (section 6).
enum class OuterEveryStep : uint8_t { kParameters = 1, kGradients = 2 };

}  // namespace sotto
