// The states of a slot in the recurrent layers of a program: short convolutions and scans.
//
// Keys and values can be dropped token by token. A state cannot: it holds all tokens at once. So a slot has one committed state of all
// layers, and the scratch of a step has a record of what each node read there. The state after a node is the state after its parent,
// moved on by the record. The tree of a forward is cut into chains once, for all layers. The states after the last nodes are kept.
// A commit takes the kept state, or moves the nearest one on by the records of the path again, by the same arithmetic.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "abi.hpp"
#include "plan.hpp"

namespace outrider {

struct Op;
struct Context;

class SlotStates {
   public:
    // ops: of a program that outlives this. kept: states of a slot that are kept during a step, besides the committed one.
    SlotStates(const Op* ops, int64_t count, int64_t slots, int64_t kept);

    // Put the new nodes of a forward in the scratch, and cut them into chains. 0, or -1 - entry: a slot has not read the held nodes.
    int64_t begin(const ForwardJob& job, const Plan& plan);
    void convolve(Context& c, const Op& op);
    void scan(Context& c, const Op& op);

    // 0; -1 - i: no forward of this step has read node path[i]; 1: it is no path from the root.
    int64_t commit(int64_t slot, const int64_t* path, int64_t count);
    void reset(int64_t slot);
    void read(int64_t slot, float* to) const;
    void write(int64_t slot, const float* from);
    int64_t size() const { return size_; }                                 // floats of a state
    int64_t made() const { return static_cast<int64_t>(blocks_.size()); }  // states in memory

   private:
    static constexpr int32_t NONE = -1;
    static constexpr int32_t PADDING = -2;
    // What one op has in a state and in a record.
    struct Part {
        const Op* op = nullptr;
        int64_t state = 0, record = 0, rows = 0;  // where it begins; rows: taps - 1 of a convolution, else 0
    };
    struct Node {
        int32_t parent, block;  // block: of the state after it
        float* record;
        std::shared_ptr<float[]> memory;  // of the record
    };
    struct Slot {
        std::vector<Node> nodes;  // of the scratch
        int32_t committed = NONE;
    };
    // Nodes of which each is the parent of the next. A place is a block, or -2 - the number of a passing state, or NONE for zeros.
    struct Chain {
        int32_t start, end, wave;  // end: where the running state is
        std::vector<const float*> records;
        std::vector<int32_t> rows, places;  // rows: of the forward; NONE: a held node. places: where the state after a node goes
    };
    // An input of a convolution: of a record, or `beyond` steps before the root.
    struct Past {
        const float* base;
        int32_t beyond;
    };
    struct Records {
        std::shared_ptr<float[]> memory;
        int64_t size;
    };

    std::vector<Part> parts_;  // by the numbers of the states
    std::vector<Slot> slots_;
    std::vector<std::shared_ptr<float[]>> blocks_;
    std::vector<int32_t> free_, retired_;
    std::vector<Records> records_;
    std::unique_ptr<float[], void (*)(void*)> zeros_;
    int64_t size_ = 0, record_ = 0, reach_ = 0, passing_ = 0, largest_ = 0, kept_;
    // Of the forward that runs.
    std::vector<Chain> chains_;
    std::vector<float*> record_of_;
    std::vector<Past> past_;  // [row, reach], the nearest first
    std::vector<float> work_;

    int32_t take();
    void give(int32_t& block);
    void retire(std::vector<Node>& nodes, size_t from);
    float* memory_of(int32_t block) const { return block == NONE ? zeros_.get() : blocks_[static_cast<size_t>(block)].get(); }
    std::shared_ptr<float[]> room(int64_t floats);
    void cut(Slot& slot, int64_t held, int32_t row);
    void run(const Part& part, const std::vector<const Chain*>& chains, const Context* c);
};

}  // namespace outrider
