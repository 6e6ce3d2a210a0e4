// Who the nodes of a call are: which cache row, which position, which slot, which parent. One per forward.
#pragma once
#include <cstdint>

#include "abi.hpp"

namespace outrider {

struct Plan {  // the arrays are the caller's; sizes for `batch` entries of `nodes` nodes
    int32_t* index;     // [batch * nodes] entry * nodes + node, padding left out
    int32_t* segment;   // [batch + 1]
    int32_t* chain;     // [batch]
    int32_t* position;  // [batch * nodes]
    int32_t* slot;      // [batch * nodes]
    int32_t* parent;    // [batch * nodes] as an index into these arrays
};

// Returns how many nodes there are, or -1 - (entry * nodes + node) for a node whose parent does not precede it.
int64_t make_plan(int64_t batch, int64_t nodes, const int64_t* parents, const int32_t* lengths, Plan& plan);

// Cuts the nodes into tasks (at most NODES nodes each) and runs them.
void run_attention(AttentionJob& job);

int worth_threads(double bytes, double multiply_adds);
void run_linear(LinearJob& job);

float from_half(uint16_t bits);

}  // namespace outrider
