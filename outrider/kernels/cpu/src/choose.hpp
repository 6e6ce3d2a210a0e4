// From logits to the tokens of a step.
#pragma once
#include "abi.hpp"

namespace outrider {

// -inf outside of the top_k largest (0: all), then of the fewest whose mass reaches top_p, then below the largest + min_p (-inf: all).
void truncate(float* x, int64_t n, int64_t top_k, double top_p, float min_p);

// The draws' results, from the logits [batch, nodes, n] of a forward.
void judge_all(const ForwardJob& job, DrawJob* draws, int64_t n);

}  // namespace outrider
