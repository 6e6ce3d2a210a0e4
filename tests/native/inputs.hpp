// Small random inputs for every native function, and the functions that take them: for exercise.cpp and witness.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "abi.hpp"
#include "plan.hpp"
#include "program.hpp"
#include "quant.hpp"

using namespace outrider;

extern "C" {
int32_t outrider_select_isa(const char* name);
void outrider_set_threads(int32_t threads);
int64_t outrider_panel_bytes(int32_t format, int64_t k);
void outrider_pack(Packed*, const void*, int32_t, int64_t n, int64_t stride_n, int64_t stride_k, int64_t start, int32_t paired);
void outrider_pack_rows(Packed*, const void*, int64_t row_bytes, int64_t n, const int64_t* order, int64_t start, int32_t paired);
void outrider_linear(const Packed*, const float* x, float* y, int64_t rows, int64_t ldx, int64_t ldy);
void outrider_unpack_column(const Packed*, int64_t column, float* out);
void* outrider_program_new(const Program*);
void outrider_program_free(void*);
int64_t outrider_forward(void*, const ForwardJob*);
int64_t outrider_step(void*, const ForwardJob*, DrawJob* draws);
void outrider_truncate(float* x, int64_t n, int64_t top_k, double top_p, float min_p);
int64_t outrider_draft_chains(void*, const ChainsJob*);
int64_t outrider_plan(int64_t batch, int64_t held, int64_t nodes, const int64_t* parents, const int32_t* lengths, Plan* plan);
void outrider_pack_vectors(int32_t format, const float* from, uint8_t* to, int64_t count, int64_t dim);
void outrider_attention(AttentionJob* job);
void* outrider_lookup_new();
void outrider_lookup_free(void*);
void outrider_lookup(void*, LookupJob* job);
void outrider_gumbel(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n, float* out);
}

namespace {

constexpr int64_t FILE_BYTES[FORMATS] = {0, 0, 0, 34, 18, 20, 22, 24, 84, 110, 144, 176, 210, 18, 136, 17};
int failures = 0;

void expect(bool fine, const std::string& what) {
    if (!fine) std::printf("WRONG: %s\n", what.c_str()), failures++;
}

struct Random {
    uint64_t state = 88172645463325252ull;
    uint64_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    }
    float real() { return static_cast<float>(next() >> 40) / (1 << 23) - 1; }
};

std::vector<float> reals(int64_t n, Random& random, float scale = 1) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& x : out) x = random.real() * scale;
    return out;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(float));
}

// Attention of a tree of six nodes, or of the last six tokens of a text, behind `length` tokens; or of one of them alone.
struct Attention {
    static constexpr int64_t NODES = 6, GROUP = 5, KV = 2, DIM = 43, VALUE_DIM = 25;
    int64_t length, cells;
    int32_t format;
    bool tree;
    std::vector<uint8_t> keys, values;
    std::vector<float> q, sinks;

    Attention(int64_t length, int32_t format, bool tree, Random& random)
        : length(length), cells(length + NODES), format(format), tree(tree), q(reals(NODES * KV * GROUP * DIM, random)),
          sinks(reals(KV * GROUP, random)) {
        auto packed = [&](int64_t dim) {
            std::vector<float> floats = reals(KV * cells * dim, random);
            std::vector<uint8_t> out(static_cast<size_t>(KV * cells * vector_bytes(format, dim)));
            outrider_pack_vectors(format, floats.data(), out.data(), KV * cells, dim);
            return out;
        };
        keys = packed(DIM), values = packed(VALUE_DIM);
    }
    std::vector<float> run(int64_t window, float softcap, int64_t from = 0, int64_t count = NODES) const {
        const int64_t chain[NODES] = {-1, 0, 1, 2, 3, 4}, branches[NODES] = {-1, 0, 0, 1, 3, 2};
        int32_t ints[6 * NODES + 4], lengths[] = {static_cast<int32_t>(length)}, row = 0, *at = ints;
        auto take = [&](int64_t n) { return at += n, at - n; };
        Plan plan{take(NODES), take(2), take(1), take(NODES), take(NODES), take(NODES)};
        outrider_plan(1, from, count, tree ? branches : chain, lengths, &plan);
        std::vector<float> out(static_cast<size_t>(count * KV * GROUP * VALUE_DIM));
        AttentionJob job{};
        job.q = q.data() + from * KV * GROUP * DIM, job.k = keys.data(), job.v = values.data(), job.out = out.data();
        job.segment = plan.segment, job.row = &row, job.length = lengths, job.chain = plan.chain, job.position = plan.position;
        job.slot = plan.slot, job.parent = plan.parent, job.index = plan.index, job.sinks = sinks.data(), job.segments = 1;
        job.heads = KV * GROUP, job.kv_heads = KV, job.dim = DIM, job.value_dim = VALUE_DIM, job.capacity = cells;
        job.ldq = KV * GROUP * DIM, job.ldo = KV * GROUP * VALUE_DIM, job.window = window, job.scale = 0.2f, job.softcap = softcap;
        job.format = format;
        outrider_attention(&job);
        return out;
    }
    // The same rows alone, and by two.
    void check(const std::vector<float>& all, int64_t window, float softcap, const std::string& name) const {
        for (int64_t count : {1, 2})
            for (int64_t n = 0; n < NODES; n += count) {
                std::vector<float> some = run(window, softcap, n, count);
                expect(!std::memcmp(some.data(), all.data() + n * KV * GROUP * VALUE_DIM, some.size() * sizeof(float)), name);
            }
    }
};

// A packed matrix with its memory.
struct Matrix {
    std::vector<uint8_t> data;
    std::vector<float> bias;
    std::vector<const Packed*> parts;
    Packed packed{};

    Matrix(int32_t format, int64_t n, int64_t k) {
        int64_t panels = (n + LANES - 1) / LANES, size = outrider_panel_bytes(format, k);
        data.resize(static_cast<size_t>(panels * size) + 64);
        bias.assign(static_cast<size_t>(panels * LANES), 0.25f);
        uint8_t* start = data.data() + (64 - reinterpret_cast<uintptr_t>(data.data()) % 64) % 64;
        packed = {start, bias.data(), n, k, size, format, static_cast<int32_t>(panels), nullptr, 0, 0};
    }
    explicit Matrix(std::vector<const Packed*> given, bool alternate) : parts(std::move(given)) {
        packed.format = MIXED, packed.k = parts[0]->k, packed.parts = parts.data();
        packed.count = static_cast<int32_t>(parts.size()), packed.alternate = alternate;
        for (const Packed* p : parts) packed.n += p->n, packed.panels += p->panels;
    }
    Matrix(const Matrix&) = delete;
};
using Owned = std::unique_ptr<Matrix>;

// Small scales of a block as its format stores them.
void set_scales(int32_t format, uint8_t* block) {
    if (format == MXFP4) {
        *block = 120;
        return;
    }
    const uint16_t half = 0x2000;
    int64_t at = format == Q2_K ? 80 : format == Q3_K ? 108 : format == Q6_K ? 208 : 0;
    std::memcpy(block + at, &half, 2);
    if (block_of(format).min) std::memcpy(block + at + 2, &half, 2);
}

// A matrix as a file has it.
std::vector<uint8_t> random_blocks(int32_t format, int64_t n, int64_t k, Random& random) {
    int64_t count = n * k / (block_of(format).super ? SUPER : BLOCK);
    std::vector<uint8_t> raw(static_cast<size_t>(count * FILE_BYTES[format]));
    for (uint8_t& b : raw) b = static_cast<uint8_t>(random.next() >> 30);
    for (int64_t i = 0; i < count; i++) set_scales(format, raw.data() + i * FILE_BYTES[format]);
    return raw;
}

Owned random_matrix(int32_t format, int64_t n, int64_t k, Random& random) {
    Owned m = std::make_unique<Matrix>(format, n, k);
    if (!quantised(format) || FILE_BYTES[format] == 0 || k % BLOCK || (block_of(format).super && k % SUPER)) {
        std::vector<float> w = reals(n * k, random, 0.1f);
        outrider_pack(&m->packed, w.data(), FLOAT32, n, k, 1, 0, 0);
        return m;
    }
    std::vector<uint8_t> raw = random_blocks(format, n, k, random);
    std::vector<int64_t> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) order[static_cast<size_t>(i)] = n - 1 - i;
    outrider_pack_rows(&m->packed, raw.data(), static_cast<int64_t>(raw.size()) / n, n, order.data(), 0, 0);
    return m;
}

std::vector<float> product(const Packed& w, const std::vector<float>& x, int64_t first, int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * w.n));
    outrider_linear(&w, x.data() + first * w.k, y.data(), rows, w.k, w.n);
    return y;
}

enum Reads { TOKENS, EAGLE3, EAGLE1 };

// A decoder of two layers with matrices in many formats, as a program. Of a head that reads pairs it has the weights only.
struct Toy {
    static constexpr int32_t HIDDEN = 256, HEADS = 4, KV = 2, DIM = 40, INNER = 256, VOCAB = 75, SLOTS = 3, CELLS = 70;
    std::vector<Owned> matrices;
    std::vector<std::vector<float>> vectors;
    std::vector<std::unique_ptr<const Packed*>> pointers;
    std::vector<Op> ops;
    const Packed* head;
    void* decoder = nullptr;

    const Packed* matrix(int32_t format, int64_t n, int64_t k, Random& random) {
        matrices.push_back(random_matrix(format, n, k, random));
        return &matrices.back()->packed;
    }
    const Packed* mixed(std::vector<const Packed*> parts, bool alternate) {
        matrices.push_back(std::make_unique<Matrix>(std::move(parts), alternate));
        return &matrices.back()->packed;
    }
    const float* ones(int64_t n) {
        vectors.emplace_back(static_cast<size_t>(n), 1.0f);
        return vectors.back().data();
    }
    Op& add(int32_t kind, View in, View out, const Packed* w = nullptr, const float* p = nullptr) {
        Op op{};
        op.kind = kind, op.in = in, op.out = out, op.p = p, op.f[0] = kind == OP_NORM ? 1e-5f : 1;
        if (w) {
            pointers.push_back(std::make_unique<const Packed*>(w));
            op.w = pointers.back().get(), op.count = 1;
        }
        ops.push_back(op);
        return ops.back();
    }
    explicit Toy(Random& random, Reads reads = TOKENS) {
        constexpr int32_t Q = HEADS * DIM, K = KV * DIM;
        const View x{0, 0, HIDDEN}, h{1, 0, HIDDEN}, q{2, 0, Q}, k{2, Q, K}, v{2, Q + K, K}, attended{3, 0, Q}, middle{4, 0, INNER};
        vectors.reserve(32);
        for (int32_t i = 0; i < (reads == TOKENS ? 2 : 1); i++) {
            int64_t width = reads == EAGLE3 ? 2 * HIDDEN : HIDDEN;
            const Packed* four = matrix(Q4_K, Q, width, random);
            const Packed* six = matrix(Q6_K, 2 * K, width, random);
            const Packed* qkv = mixed({four, six}, false);
            const Packed* out = matrix(i ? Q5_0 : BFLOAT16, HIDDEN, Q, random);
            const Packed* gate = matrix(Q4_K, INNER, HIDDEN, random);
            const Packed* up = matrix(Q8_0, INNER, HIDDEN, random);
            const Packed* down = matrix(Q3_K, HIDDEN, INNER, random);
            add(OP_NORM, x, h, nullptr, ones(HIDDEN));
            add(OP_LINEAR, h, {2, 0, Q + 2 * K}, qkv);
            for (View part : {q, k}) {
                add(OP_NORM, part, part, nullptr, ones(DIM)).i[1] = DIM;
                Op& rope = add(OP_ROPE, part, {});
                rope.i[1] = DIM, rope.i[3] = DIM;
            }
            Op& store = add(OP_STORE, k, {});
            store.other = v, store.i[0] = i, store.i[1] = KV, store.i[2] = store.i[3] = DIM;
            if (i) add(OP_ROWS, {}, {});
            Op& attend = add(OP_ATTEND, q, attended);
            for (int32_t at = 0; int32_t n : {i, HEADS, KV, DIM, DIM, i ? 9 : 0}) attend.i[at++] = n;
            attend.f[0] = 0.2f;
            add(OP_LINEAR, attended, x, out).i[0] = ADD;
            add(OP_NORM, x, h, nullptr, ones(HIDDEN));
            add(OP_LINEAR, h, middle, mixed({gate, up}, true)).i[0] = SWIGLU;
            add(OP_LINEAR, middle, x, down).i[0] = ADD;
            Op& tap = add(OP_ROWS, x, {});
            tap.flags = OP_TAP, tap.i[0] = i;
        }
        vectors.push_back(reals(DIM / 2, random));
        const float* frequencies = vectors.back().data();
        const Packed* table = head = matrix(Q8_0, VOCAB, HIDDEN, random);
        if (reads == EAGLE3) matrix(Q8_0, HIDDEN, 3 * HIDDEN, random), matrix(BFLOAT16, 21, HIDDEN, random);
        if (reads == EAGLE1) matrix(FLOAT32, HIDDEN, 2 * HIDDEN, random);
        if (reads != TOKENS) return;
        add(OP_EMBED, {}, x, table);
        std::rotate(ops.begin(), ops.end() - 1, ops.end());
        add(OP_NORM, x, h, nullptr, ones(HIDDEN));
        Op& tap = add(OP_ROWS, h, {});
        tap.flags = OP_TAP, tap.i[0] = -1;
        add(OP_ROWS, {}, {});
        add(OP_HEAD, h, {}, head);
        const int32_t widths[] = {HIDDEN, HIDDEN, Q + 2 * K, Q, INNER};
        static const float factor = 1;
        const Angles angles{frequencies, &factor, DIM / 2, 1, 1};
        widths_.assign(widths, widths + 5), angles_ = angles;
        Program program{ops.data(), widths_.data(), &angles_, nullptr, static_cast<int64_t>(ops.size()), 5, 1, VOCAB};
        decoder = outrider_program_new(&program);
    }
    std::vector<int32_t> widths_;
    Angles angles_{};
    ~Toy() {
        if (decoder) outrider_program_free(decoder);
    }

    // Logits of a prompt of 6 tokens, then of a tree of 5 nodes and one of 3; then two chains are drafted.
    std::vector<float> text(int32_t format) {
        size_t bytes = static_cast<size_t>(SLOTS * KV * CELLS * vector_bytes(format, DIM));
        std::vector<std::vector<uint8_t>> memory(4, std::vector<uint8_t>(bytes));
        void* cache[4] = {memory[0].data(), memory[1].data(), memory[2].data(), memory[3].data()};
        std::vector<int64_t> prompt = {5, 9, 2, 74, 0, 33, 8, 8, 1, 60, 61, 3};
        std::vector<int32_t> rows = {2, 0}, lengths = {0, 0}, taps = {0, -1};
        int64_t shown = head->n;
        Random draw;
        std::vector<float> logits(2 * shown), features(2 * 6 * 2 * HIDDEN), given(12);
            ForwardJob job{};
        job.tokens = prompt.data(), job.rows = rows.data(), job.lengths = lengths.data(), job.cache = cache;
        job.logits = logits.data(), job.features = features.data(), job.taps = taps.data(), job.taps_count = 2;
        job.batch = 2, job.nodes = 6, job.capacity = CELLS, job.want = 1, job.cache_format = format;
        expect(outrider_forward(decoder, &job) == 0, "a prompt");
        std::vector<int64_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 0, 0}, parents = {-1, 0, 0, 1, 3, -1, 0, -1, -2, -2};
        std::vector<float> tree(10 * shown);
        lengths = {6, 6};
        job.tokens = tokens.data(), job.parents = parents.data(), job.nodes = 5, job.want = 2, job.taps_count = 0;
        job.logits = tree.data();
        expect(outrider_forward(decoder, &job) == 0, "two trees");
        parents[3] = 7;
        expect(outrider_forward(decoder, &job) < 0, "a parent that comes later is refused");
        tokens[0] = VOCAB, parents[3] = 1;
        expect(outrider_forward(decoder, &job) < 0, "a token outside of the vocabulary is refused");
        std::vector<int64_t> drafted(9), siblings(10);
        std::vector<float> chances(4 + 5 * 3);
        ChainJob chains[2] = {};
        for (int32_t i = 0; i < 2; i++) {
            ChainJob& c = chains[i];
            c.tokens = prompt.data(), c.features = given.data(), c.drafted = drafted.data() + 4 * i, c.chances = chances.data() + 4 * i;
            c.siblings = siblings.data(), c.width = 1 + 2 * i, c.count = 2 - i, c.depth = 4 + i;
            c.row = 2 - 2 * i, c.length = 6, c.seed = 7, c.step = 1, c.position = 6;
            c.temperature = 0.8f * static_cast<float>(i), c.error = 1.5f * static_cast<float>(i);
        }
        ChainsJob both{chains, cache, 2, CELLS, format};
        expect(outrider_draft_chains(decoder, &both) == 0, "chains");
        expect(chains[0].made == 4 && chains[1].made == 5, "chains are whole");
        tree.insert(tree.end(), logits.begin(), logits.end());
        tree.insert(tree.end(), chances.begin() + 4, chances.end());
        drafted.insert(drafted.end(), siblings.begin(), siblings.end());
        for (int64_t t : drafted) tree.push_back(static_cast<float>(t));
        return tree;
    }

    // Tokens that are drawn one by one, by several parameters. As drafts in a tree they are accepted, and the same token follows.
    std::vector<int64_t> drawn(int32_t format) {
        struct Law {
            float temperature;
            int64_t top_k;
            double top_p;
            float min_p;
        };
        const float all = -INFINITY;
        const Law laws[] = {{0, 0, 1, all}, {0.8f, 0, 1, all}, {1.5f, 20, 1, all}, {1, 0, 0.9, all}, {2, 0, 1, -2}, {0.7f, 30, 0.8, -3}};
        constexpr int64_t DRAFTS = 4, NODES = 2 * DRAFTS + 1;  // of each token and of another one, its sibling
        size_t bytes = static_cast<size_t>(SLOTS * KV * CELLS * vector_bytes(format, DIM));
        std::vector<std::vector<uint8_t>> memory(4, std::vector<uint8_t>(bytes));
        void* cache[4] = {memory[0].data(), memory[1].data(), memory[2].data(), memory[3].data()};
        std::vector<int64_t> out;
        for (const Law* law = laws; law < laws + 6; law += SLOTS) {
            std::vector<int64_t> tokens = {5, 74, 33}, path(SLOTS * NODES), texts = tokens, parents;
            std::vector<int32_t> rows = {2, 0, 1}, lengths(SLOTS);
            std::vector<float> logits(SLOTS * NODES * VOCAB);
            DrawJob draws[SLOTS]{};
            ForwardJob job{};
            job.tokens = tokens.data(), job.rows = rows.data(), job.lengths = lengths.data(), job.cache = cache;
            job.logits = logits.data(), job.batch = SLOTS, job.nodes = 1, job.capacity = CELLS, job.want = 2, job.cache_format = format;
            for (int64_t b = 0; b < SLOTS; b++) {
                draws[b].path = path.data() + b * NODES, draws[b].seed = 11, draws[b].stream = static_cast<uint32_t>(b);
                draws[b].temperature = law[b].temperature, draws[b].top_k = law[b].top_k, draws[b].top_p = law[b].top_p;
                draws[b].min_p = law[b].min_p;
            }
            for (int64_t n = 0; n <= DRAFTS; n++) {
                for (DrawJob& asked : draws) asked.position = static_cast<uint32_t>(n);
                expect(outrider_step(decoder, &job, draws) == 0, "a step");
                for (int64_t b = 0; b < SLOTS; b++) {
                    expect(draws[b].accepted == 0 && draws[b].token >= 0 && draws[b].token < VOCAB, "a step without a draft");
                    texts.push_back(tokens[b] = draws[b].token), lengths[b]++;
                }
            }
            tokens.clear();
            for (int64_t b = 0; b < SLOTS; b++) {
                tokens.push_back(texts[b]), parents.push_back(-1);
                for (int64_t n = 1; n <= DRAFTS; n++)
                    for (int64_t other : {1, 0}) {  // the token is the second child, and the next two are below it
                        tokens.push_back((texts[n * SLOTS + b] + other) % VOCAB), parents.push_back(n == 1 ? 0 : 2 * n - 2);
                    }
                lengths[b] = 0, draws[b].position = 0;
            }
            job.tokens = tokens.data(), job.parents = parents.data(), job.nodes = NODES;
            expect(outrider_step(decoder, &job, draws) == 0, "a step with trees");
            for (int64_t b = 0; b < SLOTS; b++) {
                bool whole = draws[b].accepted == DRAFTS && draws[b].token == texts[(DRAFTS + 1) * SLOTS + b];
                for (int64_t n = 0; n <= DRAFTS; n++) whole = whole && draws[b].path[n] == 2 * n;
                expect(whole, "a draft of the tokens that come is not accepted whole");
            }
            draws[0].by_host = 1, draws[0].token = 42;
            expect(outrider_step(decoder, &job, draws) == 0 && draws[0].token == 42, "what the host draws is left alone");
            out.insert(out.end(), texts.begin(), texts.end());
        }
        return out;
    }
};

// What is left of scores of many kinds, one after another.
std::vector<float> truncated(Random& random) {
    std::vector<float> out;
    for (int64_t n : {1, 300, 9001})
        for (float scale : {0.0f, 0.01f, 3.0f, 20.0f})
            for (auto [top_k, top_p, min_p] : {std::tuple<int64_t, double, float>{0, 1, -INFINITY}, {1, 1, -INFINITY}, {50, 1, -INFINITY},
                                               {0, 0.0, -INFINITY}, {0, 0.5, -INFINITY}, {0, 0.999, -INFINITY}, {0, 1, -1}, {70, 0.7, -2}})
                for (int32_t kind : {0, 1, 2}) {
                    std::vector<float> x = reals(n, random, scale);
                    if (kind == 1)
                        for (float& v : x) v = v < 0 ? -INFINITY : std::round(v);  // many are equal
                    if (kind == 2) x[static_cast<size_t>(n / 2)] = NAN;
                    outrider_truncate(x.data(), n, top_k, top_p, min_p);
                    out.insert(out.end(), x.begin(), x.end());
                }
    return out;
}

}  // namespace
