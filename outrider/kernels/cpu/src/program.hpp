// A forward as a program: ops over registers. A family of models is a program; nothing here names a family.
//
// A register is a buffer [nodes, width]. A view is some columns of one, so splitting and joining cost nothing. Consecutive ops of
// single nodes run in one `parallel`. Every op gives a node the same bits for any other nodes in the call, so a program does too.
#pragma once
#include <cstdint>

#include "abi.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace outrider {

// What an op reads and writes. [x]: only if the view or pointer is there.
enum OpKind : int32_t {
    // out = f0 * the row of the token. w0, or p: a table of i1 rows in format i0.
    OP_EMBED,
    // out = norm(in) * [p] + [q]; ADD: out += that. f0: eps. i0: a Norm. i1: numbers of a group, each normed on its own; 0: all.
    // PER_GROUP: p and q are as wide as `in`, else as a group.
    OP_NORM,
    // out = f0 * (W in + b), or as the finish i0 says. w0.
    OP_LINEAR,
    // out = W in for each head on its own. w0: the outputs of one head after another. i0: heads. i1: numbers from a head of `in` to the
    // next. i2: of `out`.
    OP_HEADS,
    // Rotates each head of `in` in place. i0: the table of angles. i1: numbers of a head. i2: where the rotated ones begin in it.
    OP_ROPE,
    // Keys `in` and values `other` into the cache. i0: its layer. i1: heads. i2, i3: numbers of a key, of a value.
    OP_STORE,
    // out = attention of queries `in`. i0: the cache's layer. i1: heads. i2: heads of keys. i3, i4: numbers of a key, of a value.
    // i5: window or 0. f0: scale. f1: softcap or 0. p: sinks [heads]. SAME: a value is the first numbers of its key.
    OP_ATTEND,
    // Router logits `in` -> out: k expert numbers (as floats), then k weights. i0: a Router. i1: k. i2, i3: groups, and those kept.
    // p: correction [experts]. q: factors of each expert's weight. NORMALISED: weights are divided by their sum. f0: factor.
    // f1: what is added to that sum.
    OP_ROUTE,
    // out = sum of weight * down(act(gate_up(in))) over the experts of `other`, what OP_ROUTE wrote. w: gate_up, down of each expert.
    // i0: k. i1: an Activation; RELU2: there is no gate, and `up` takes its place. i2: width of the middle.
    // f0: limit. f1: alpha. f2: added to up. ADD: out += f3 * that.
    OP_EXPERTS,
    // out = act(in) * [other]. i0: an Activation.
    OP_GATE,
    // out = g(in * [p] + [q]) * f0, i0: a Map. p and q are as wide as `in`. i1: so many times, `in` and `out` moved on by i2 and i3
    // numbers.
    OP_MAP,
    // out = [silu](causal convolution of `in` over the node's path + [q]). p: taps [i1, width], the oldest first. i0: state. i2: SILU.
    OP_CONV,
    // A recurrence over the node's path. i0: state. i1: a Recurrence. i2: heads. i3: keys. i4: width. i5: groups. i6: 1: per column.
    // A record of ScanJob is `in` and then `other`. DELTA_RULE: query, key, value; step, decay. f0: factor. SELECTIVE: value, key, query;
    // step. p: a. q: through.
    OP_SCAN,
    // TAP: `in` is what tap number i0 shows. Else: from here on only the nodes whose logits are wanted.
    OP_ROWS,
    // What the caller gives to each node -> out.
    OP_GIVEN,
    // Logits = f0 * (W in), softcap f1 or 0. w0. other: what is fed back.
    OP_HEAD,
    OPS,
};
enum OpFlag : int32_t {
    OP_ADD = 1,
    OP_PER_GROUP = 2,
    OP_INTERLEAVED = 4,  // pairs of ROPE are neighbours, else half a turn apart
    OP_NORMALISED = 8,
    OP_TAP = 16,
    OP_FRESH = 32,  // runs only where the caller gives features
    OP_FED = 64,    // runs only where the caller gives what was fed back
    OP_SAME = 128,
};
enum Norm : int32_t { RMS_NORM, LAYER_NORM };
enum Activation : int32_t { IDENTITY, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, SWISH };  // SWISH: x * sigmoid(alpha x)
enum Map : int32_t { LINEAR_MAP, SOFTPLUS, EXP, EXP_NEGATIVE, SIGMOID_MAP, SOFTCAP };
enum Router : int32_t { SOFTMAX_TOP, TOP_SOFTMAX, SIGMOID_TOP };  // softmax and then the top; softmax of the top; sigmoid

// A buffer that only grows.
class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer();
    float* need(int64_t floats);  // 64-byte aligned; what it held is lost when it grows

   private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

class SlotStates;

// What an op of a forward sees.
struct Context {
    SlotStates* states;         // null without recurrent layers
    const ForwardJob* job;
    Plan plan;
    int64_t count;              // rows of the registers from here on
    const int32_t* node;        // [count] the plan's node of each row; ascending
    const int32_t* segment_of;  // of the plan's nodes
    const int32_t* row_of;      // of the plan's nodes, if only the wanted ones are left
    const int32_t* begin;       // [batch] first node of each entry that is left; null: all are
    const int32_t* place;       // [count] the row of the logits of each, if there are any
    float* const* registers;
    const int64_t* stride;       // floats from a row to the next
    float* const* angles;        // of each table: [plan's node][2 * half]
    Buffer* scratch;             // of the op that runs

    float* row(const View& v, int64_t n) const { return registers[v.reg] + n * stride[v.reg] + v.offset; }
};

// each(n) for every row. cost: microseconds per row, roughly.
template <class Each>
void over_nodes(const Context& c, double cost, const Each& each) {
    struct Call {
        const Each* each;
        static void run(void* context, int64_t begin, int64_t end) {
            for (int64_t n = begin; n < end; n++) (*static_cast<Call*>(context)->each)(n);
        }
    } call{&each};
    parallel(&Call::run, &call, c.count, static_cast<int>(cost * static_cast<double>(c.count) / 5) + 1);
}

void run_route(Context& c, const Op& op);    // experts.cpp
void run_experts(Context& c, const Op& op);  // experts.cpp
void run_conv(Context& c, const Op& op);     // states.cpp
void run_scan(Context& c, const Op& op);     // states.cpp

}  // namespace outrider
