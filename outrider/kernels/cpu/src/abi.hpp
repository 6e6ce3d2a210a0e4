// What crosses the C boundary, and what the instruction-set variants offer to the code above them.
// Plain structs of fixed-width fields, mirrored field by field in ../library.py.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define OUTRIDER_API extern "C" __declspec(dllexport)
#else
#define OUTRIDER_API extern "C" __attribute__((visibility("default")))
#endif

namespace outrider {

enum Format : int32_t {
    FLOAT32, BFLOAT16, FLOAT16,
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,  // quantised: see quant.hpp
    FORMATS,
    MIXED = -1,  // a `Packed` made of others
};
// What is done with a finished output element. CLAMPED: gate * sigmoid(slope * gate) * (up + plus), where gate <= limit and |up| <= limit.
enum Finish : int32_t { STORE = 0, ADD = 1, SWIGLU = 2, GEGLU = 3, CLAMPED = 4 };

// How the slot cache keeps the key, or the value, of a head. INT8: for each block of CACHE_BLOCK numbers a float32 scale, all
// scales first, then a byte for each number.
enum CacheFormat : int32_t { CACHE_FLOAT32 = 0, CACHE_BFLOAT16 = 1, CACHE_INT8 = 2 };
constexpr int64_t CACHE_BLOCK = 32;
inline int64_t vector_bytes(int32_t format, int64_t dim) {
    return format == CACHE_FLOAT32 ? 4 * dim : format == CACHE_BFLOAT16 ? 2 * dim : dim + 4 * ((dim + CACHE_BLOCK - 1) / CACHE_BLOCK);
}

constexpr int64_t ATTENTION_SPAN = 256;  // positions of a chunk: they are added up apart, in one order
constexpr int64_t ATTENTION_NODES = 32;  // most nodes of a task
constexpr int64_t LANES = 16;       // output columns of one panel
constexpr int64_t RIVALS = 8;       // candidates that share the chance of a draft token
constexpr int64_t GROUP = 4;        // panels of one unit of work

// The rows of a matrix, as ggml's blocks in a mapped file.
struct Rows {
    const uint8_t* from;
    int64_t row_bytes, n;
};

// Weights of y = x W^T + b, as panels of 16 output columns: [panel][k][16], or as quant.hpp says.
struct Packed {
    uint8_t* data;
    float* bias;  // padded to 16; or null
    int64_t n, k;
    int64_t panel_bytes;
    int32_t format, panels;
    // MIXED: panels of other formats. They follow one another, or alternate (gate and up).
    const Packed* const* parts;
    int32_t count, alternate;
    // What `complete` packs into `data`: the matrix, or gate and up, in the format. Null: it is packed.
    const Rows* unread;
    int64_t unread_count;
};

struct LinearJob {
    const Packed* w;
    const float* x;
    float* y;
    int64_t rows, ldx, ldy;
    float factor = 1;  // STORE: y = factor * out; ADD: y += factor * out
    int32_t finish = STORE;
    const int32_t* place = nullptr;  // STORE: the row of y each row goes to; null: in order
    const uint8_t *x8 = nullptr, *x16 = nullptr;  // the rows in 8 and in 16 bits, [block][row], where the weights need them; made by run_linear
    float limit = 0, slope = 0, plus = 0;  // of CLAMPED
};

struct QuantiseJob {
    const float* x;
    int64_t rows, ldx, k;
    uint8_t *x8 = nullptr, *x16 = nullptr;  // null: not wanted
};

// Attention of T nodes over the slot cache. Nodes of one batch entry (a segment) are consecutive.
struct AttentionJob {
    const float* q;  // [node, heads, dim], ldq apart
    const void* k;   // [rows, kv_heads, capacity, dim] in the format
    const void* v;   // [rows, kv_heads, capacity, value_dim] in the format; k: a value is the first numbers of its key
    float* out;      // [node, heads, value_dim], ldo apart
    const int32_t* segment;   // [segments + 1] first node of each
    const int32_t* row;       // [segments] cache slot
    const int32_t* length;    // [segments] committed tokens
    const int32_t* chain;     // [segments] 1: position n is in cell n
    const int32_t* position;  // of nodes, and of ancestors that are no node of this call
    const int32_t* slot;
    const int32_t* parent;    // an index into position, slot and parent; -1 for a root
    const int32_t* index;     // [T] place of a node in q and out; null: in order
    const float* sinks;       // [heads] or null
    int64_t segments, heads, kv_heads, dim, value_dim, capacity, ldq, ldo;
    int64_t window;  // 0: everything
    float scale, softcap;  // softcap 0: none
    const int32_t* begin;  // [segments] first node of each that attends; null: all of them do
    // What follows is set by run_attention.
    int64_t chunk, share;  // nodes, and heads of a head of keys, of one task
    const int32_t* task_segment;  // of each run of nodes
    const int32_t* task_first;    // first node of the run
    int32_t format;  // a CacheFormat
    // A call that is cut over the context: slices of so many chunks, and what each chunk gives to each node and head. Null: it is not.
    float* parts;
    int64_t chunks, slice, slices;  // chunks: room for those of a node
};

struct View {
    int32_t reg, offset, width;  // width 0: there is none
};

struct Op {  // program.hpp says what each kind reads
    int32_t kind, flags;
    View in, other, out;
    int32_t count;  // of w
    const Packed* const* w;
    const float *p, *q;
    int32_t i[8];
    float f[6];
};

// A rotary embedding: cosines, then sines, of each node.
struct Angles {
    const float* inv_freq;  // [half]
    const float* factor;    // [factors] of cosines and sines: each of `every` positions, the last one from there on
    int32_t half, every, factors;
};

struct Program {
    const Op* ops;
    const int32_t* width;  // of each register
    const Angles* angles;
    const int64_t* head_ids;  // the token of each row of the head, ascending; null: row i is token i
    int64_t count, registers, tables, vocab;
};

struct ForwardJob {
    const int64_t* tokens;   // [batch, nodes]
    const int64_t* parents;  // [batch, held + nodes], or null: a full chain
    const int32_t* rows;     // [batch]
    const int32_t* lengths;  // [batch]
    void* const* cache;      // [2 * layers] keys, values of each layer
    float* logits;        // as wide as the head
    float* features;      // [batch, nodes, taps * hidden]
    const int32_t* taps;  // layer numbers; -1: after the final norm
    int64_t batch, held, nodes, capacity, taps_count;  // held: nodes that are in the scratch already
    int32_t want;  // 0 none, 1 last, 2 all
    int32_t cache_format;
    const float* given;  // to each node [batch, nodes, width]: features, or what was fed back
    float* fed_back;     // what the nodes feed back to their children, [batch, nodes or 1, width] as `want` says
    int32_t fused;       // 1: `given` was fed back
    void* states;        // of the slots, for a program with recurrent layers
};

// How the token after a node is drawn, and which nodes of a draft equal the tokens that are.
struct DrawJob {
    int64_t* path;           // [nodes] out: the nodes that are accepted, the root first
    int64_t accepted, token;  // out: nodes below the root, and the token after the last of them; -1: there is none
    int64_t top_k;            // 0: all
    double top_p;
    uint64_t seed;
    uint32_t stream, step, position;  // of the noise after the root
    float temperature;                // 0: greedy
    float min_p;                      // its logarithm; -inf: none
    int32_t by_host;                  // 1: other parameters count too; nothing is done here
};

struct ChainJob {  // draft `depth` tokens of a slot one after another, after the given ones
    const int64_t* tokens;  // [count] ingested first
    const float* features;  // [count, width] of a program that is given some
    int64_t* drafted;       // [depth]
    int64_t count, depth;
    float* chances;         // [depth, width] out: of each token and its siblings to be accepted, given those before; unset without `error`
    int64_t* siblings;      // [depth, width - 1] out: the next most likely tokens beside each; -1 where there is none
    int64_t width;          // tokens of a level; more than 1 only with `error`
    int64_t made;           // out: tokens drafted; fewer than asked if the logits held NaN or the chances are low
    uint64_t seed;
    int32_t row, length;
    uint32_t stream, step, position;  // of the first drafted token's noise
    float temperature;                // 0: greedy
    float error;                      // scale of the logits' errors, which gives chances; 0: there are none
    float min_probability;            // no token follows one whose chance, with those before it, is lower
    float alive;                      // the product of the chances so far
};

struct ChainsJob {  // one forward per level for all chains
    ChainJob* chains;
    void* const* cache;
    int64_t count, capacity;
    int32_t cache_format;
};

// A sorted text: its places in the order of the tokens before them. `order` counts them from the end.
struct Segment {
    const int32_t* tokens;
    const int32_t* order;
    int64_t count;
};

struct Segments {  // of a corpus
    const Segment* segments;
    int64_t count;
};

struct LookupJob {  // read more of a text, and propose what follows: a tree, its root first
    const int32_t* unread;
    const Segments* corpora;  // where else to look
    const int32_t* forced;    // what a grammar leaves no choice about
    int64_t unread_count, corpora_count, forced_count;
    int64_t depth, width, nodes;  // of the tree, at most; the root does not count
    double least, doubt;
    int32_t *tokens, *parents;  // [nodes + 1] out, and `masses`
    double* masses;
    int64_t made, match;  // out: nodes, and tokens of the longest end that was found
};

enum Recurrence : int32_t { DELTA_RULE = 0, SELECTIVE = 1 };
// Of a head's state that one unit of work moves on. Where they are all, the state is read in order, and fetched ahead.
constexpr int64_t SCAN_COLUMNS = 128;
constexpr int64_t SCAN_CHANNELS = 8;  // of a selective layer in one unit of work

// Chains of nodes through a recurrent layer. A state is [heads, keys, width]. What a node reads lies in one record of floats.
// DELTA_RULE: query [groups, keys], key [groups, keys], value [heads, width], step (beta) [heads], decay [heads] or [heads, keys].
// SELECTIVE: a head has `keys` channels. value (x) [heads, keys], key (B) [groups, width], query (C) [groups, width], step (dt) [heads].
// Heads share the groups in order.
struct ScanJob {
    const float* const* records;  // of each node, chain after chain
    float* const* out;            // DELTA_RULE: [heads, width]; SELECTIVE: [heads, keys]; null: nowhere
    float* const* states;         // where the state after each node goes
    const float* const* starts;   // [count]: the state before the first node
    const int64_t* chains;        // [count + 1]: where each begins among the nodes
    const float* a;               // SELECTIVE: [heads] or [heads, width]
    const float* through;         // SELECTIVE: [heads]: how much of x goes to the output as it is; null: nothing
    int64_t count, heads, keys, width, groups;
    int64_t query, key, value, step, decay;  // where each begins in a record
    float factor;                            // DELTA_RULE: of the output
    int32_t kind, per_column;                // per_column: the longer form of `decay` or `a`
};

// Units of work of one chain.
inline int64_t scan_units(const ScanJob& job) {
    return job.kind == SELECTIVE ? (job.heads * job.keys + SCAN_CHANNELS - 1) / SCAN_CHANNELS
                                 : job.heads * ((job.width + SCAN_COLUMNS - 1) / SCAN_COLUMNS);
}

// A router: the k experts of each row, best first, and their weights. Of equal ones the lower number is first.
struct RouteJob {
    const float* logits;      // [row, experts], ldx apart
    float* out;               // [row, k numbers of experts and then k weights], ldo apart
    const float* correction;  // [experts], added to choose, and not to the weights; or null
    const float* scale;       // [experts], factors of the weights; or null
    int64_t rows, ldx, ldo, experts, k;
    int64_t groups, kept;  // only experts of the `kept` best groups are chosen; 0: there are no groups
    int32_t kind, normalised;  // a Router (program.hpp). normalised: weights are divided by `added` and their sum
    float factor, added;       // of the weights
};

// out = sum of weight * down(activation(gate_up(x))) over the experts of a row, in the router's order.
struct ExpertsJob {
    const Packed* const* w;  // gate_up (gate and up alternate) and down of each expert
    const float* x;          // [row, hidden], ldx apart
    const float* routed;     // what RouteJob writes, ldr apart
    float* out;              // [row, hidden], ldo apart
    int64_t rows, ldx, ldr, ldo, experts, k;
    int32_t finish, add;     // SWIGLU, GEGLU or CLAMPED; STORE: relu(up)^2, without a gate. add: out += factor * the sum
    float factor, limit, slope, plus;
};

struct Kernels {
    void (*linear)(void* job, int64_t begin, int64_t end);     // units of GROUP panels
    void (*quantise)(void* job, int64_t begin, int64_t end);   // blocks of 32 inputs, of all rows
    void (*attention)(void* job, int64_t begin, int64_t end);  // tasks
    void (*attention_join)(void* job, int64_t begin, int64_t end);  // heads of each run of nodes, of a call that is cut over the context
    void (*pack_vectors)(int32_t format, const float* from, uint8_t* to, int64_t count, int64_t dim);  // a CacheFormat
    void (*weighted_sum)(const float* const* rows, const float* weights, int64_t count, float factor, int32_t add, float* y, int64_t n);
    void (*norm)(const float* x, const float* weight, const float* bias, float* y, int64_t n, float eps, int32_t centred, int32_t add);
    void (*rope)(float* x, const float* cosine, const float* sine, int64_t rotary, int32_t neighbours);
    void (*softcap)(float* x, int64_t n, float cap);
    void (*unpack_column)(const Packed* w, int64_t column, float* out, float factor);
    void (*gumbel)(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n, float* out);
    void (*gumbel_at)(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, const int64_t* index, int64_t n,
                      float* out);
    void (*words)(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n, uint32_t* out);
    void (*top_keys)(const float* scores, const int64_t* ids, int64_t n, float temperature, uint64_t seed, uint32_t stream,
                     uint32_t step, uint32_t position, int64_t best_index, float reach, float* top, int64_t* indices);
    int64_t (*argmax)(const float* scores, int64_t n);  // -1: a NaN was seen
    int64_t (*argmax_gumbel)(const float* scores, const int64_t* ids, int64_t n, float temperature, uint64_t seed,
                             uint32_t stream, uint32_t step, uint32_t position);
    void (*softmax)(int32_t logarithm, const float* x, float* y, int64_t n);  // of one row; 1: its logarithm
    void (*logarithm)(const double* x, double* y, int64_t n);
    double (*total)(const double* x, int64_t n);
    void (*scan)(void* job, int64_t begin, int64_t end);  // units of columns or channels of a chain
    // out = [silu](the sum over taps of weights [taps, n] * inputs, the oldest first + bias [n] or null)
    void (*convolve)(const float* const* inputs, const float* weights, const float* bias, float* out, int64_t n, int64_t taps,
                     int32_t silu);
    void (*gate)(int32_t activation, const float* a, const float* b, float* out, int64_t n);
    void (*map)(int32_t function, const float* x, const float* p, const float* q, float factor, float* y, int64_t n);
    void (*elementwise)(int32_t function, const float* x, float* y, int64_t n);  // for tests: exp, log, tanh
};

// Kernels for one instruction set. needs: what the processor must have.
struct Variant {
    const char* name;
    uint32_t needs;
    const Kernels* kernels;
};
enum : uint32_t { HAS_AVX2 = 1, HAS_AVX_VNNI = 2, HAS_AVX512 = 4, HAS_AVX512_VNNI = 8, HAS_DOTPROD = 16 };  // AVX2: with FMA and F16C. AVX512: F, BW, VL, DQ

extern const Variant VARIANTS[];  // the fastest first; the last one needs nothing
extern const int64_t VARIANT_COUNT;

const Kernels* kernels();  // those in use

}  // namespace outrider
