// The nodes of a call: the cache slot, position, cell and parent of each. One plan per forward.
#pragma once
#include <cstdint>

#include "abi.hpp"

namespace outrider {

// The arrays belong to the caller. Each of `batch` entries has `held` nodes that are in the scratch already, and `nodes` new ones.
// The new nodes come first, one after another, without padding. The held nodes start at batch * nodes, only as ancestors.
struct Plan {
    int32_t* index;     // [batch * nodes] entry * nodes + node
    int32_t* segment;   // [batch + 1]
    int32_t* chain;     // [batch]
    int32_t* position;  // [batch * (held + nodes)]
    int32_t* slot;      // [batch * (held + nodes)]
    int32_t* parent;    // [batch * (held + nodes)] as an index into these arrays
};

// parents: [batch, held + nodes]; null for a full chain (held is 0). Returns how many new nodes there are, or
// -1 - (entry * (held + nodes) + node) for a node whose parent does not precede it.
int64_t make_plan(int64_t batch, int64_t held, int64_t nodes, const int64_t* parents, const int32_t* lengths, Plan& plan);

// Cuts the nodes into tasks (at most NODES nodes each) and runs them.
void run_attention(AttentionJob& job);

// What a matrix asks of its inputs, and its bytes.
struct Needs {
    bool eight = false, sixteen = false, floats = false;
    double bytes = 0;
    void add(const Packed& w);
};

// Packs a matrix that is packed when it is first needed. Threads may call it together.
void complete(const Packed& w);

int worth_threads(double bytes, double multiply_adds);
void run_linear(LinearJob& job);
// A linear for each head on its own. w: the outputs of one head after another, whole panels each. from, to: numbers from a head's inputs,
// and outputs, to those of the next.
void run_heads(const LinearJob& job, int64_t heads, int64_t from, int64_t to);
void run_scan(ScanJob& job);

float from_half(uint16_t bits);

}  // namespace outrider
