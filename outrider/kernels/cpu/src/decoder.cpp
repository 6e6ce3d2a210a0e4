// One call per forward of a Llama-like decoder. Every part gives a row the same bits for any other rows in the call, so the whole
// does too. Short parts run on the calling thread; the pool stays awake between phases.
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "abi.hpp"
#include "angle.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace outrider {
namespace {

// A row length that is not a power of two: rows must not all map to the same cache sets.
int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }
struct Buffer {
    static constexpr std::align_val_t ALIGNED{64};
    float* data = nullptr;
    int64_t size = 0;
    float* need(int64_t floats) {
        if (floats > size) {
            ::operator delete(data, ALIGNED);
            data = nullptr;
            size = floats + floats / 4;
            data = static_cast<float*>(::operator new(static_cast<size_t>((size * 4 + 63) / 64 * 64), ALIGNED));
        }
        return data;
    }
    ~Buffer() { ::operator delete(data, ALIGNED); }
};

struct Decoder {
    Model m;
    std::mutex busy;
    Buffer x, h, qkv, att, act, angles, features, logits, fed_back;
    std::vector<int32_t> ints;
    int64_t ldx, ldh, ldqkv, ldatt, ldact, ldfeatures;

    explicit Decoder(const Model& model) : m(model) {
        ldx = padded(m.hidden);
        ldh = m.pairs ? padded(2 * m.hidden) : ldx;
        ldfeatures = m.pairs ? padded(m.pairs->token_norm ? m.pairs->feature_size : 2 * m.hidden) : 0;
        ldqkv = padded((m.heads + 2 * m.kv_heads) * m.dim);
        ldatt = padded(m.heads * m.dim);
        ldact = padded(m.intermediate);
    }
};

struct Step {  // what the small phases of one forward need
    Decoder* d;
    const ForwardJob* job;
    const Layer* layer;
    Plan plan;
    int64_t count;
    float *x, *h, *qkv, *angles, *features;
    uint8_t *keys, *values;
    const float* weight;           // of a norm; null: it only copies
    const int32_t* segment_of;     // [count]
    const int32_t* which;          // nodes to normalise; null: all
};

void copy(float* to, const float* from, int64_t floats) { std::memcpy(to, from, static_cast<size_t>(floats) * 4); }

void embed(const Model& m, int64_t token, float* to) {
    if (m.table) {
        kernels()->unpack_column(m.table, token, to, m.embedding_factor);
        return;
    }
    for (int64_t i = 0, at = token * m.hidden; i < m.hidden; i++, at++) {
        float v;
        if (m.embedding_format == FLOAT32) {
            v = static_cast<const float*>(m.embedding)[at];
        } else {
            uint16_t half = static_cast<const uint16_t*>(m.embedding)[at];
            uint32_t bits = static_cast<uint32_t>(half) << 16;
            std::memcpy(&v, &bits, 4);
            if (m.embedding_format == FLOAT16) v = from_half(half);
        }
        to[i] = v * m.embedding_factor;
    }
}

void start_nodes(void* context, int64_t begin, int64_t end) {
    Step& s = *static_cast<Step*>(context);
    const Model& m = s.d->m;
    int64_t half = m.rotary / 2;
    for (int64_t n = begin; n < end; n++) {
        embed(m, s.job->tokens[s.plan.index[n]], m.pairs ? s.h + n * s.d->ldh : s.x + n * s.d->ldx);
        float* angle = s.angles + n * m.rotary;
        for (int64_t i = 0; i < half; i++) {
            double sine, cosine;
            sine_cosine(static_cast<double>(static_cast<float>(s.plan.position[n]) * m.inv_freq[i]), sine, cosine);
            angle[i] = static_cast<float>(cosine) * m.rope_factor;
            angle[half + i] = static_cast<float>(sine) * m.rope_factor;
        }
    }
}

void normalise(void* context, int64_t begin, int64_t end) {
    Step& s = *static_cast<Step*>(context);
    for (int64_t n = begin; n < end; n++) {
        const float* from = s.x + (s.which ? s.which[n] : n) * s.d->ldx;
        float* to = s.h + n * s.d->ldh;
        if (s.weight) kernels()->rmsnorm(from, s.weight, to, s.d->m.hidden, s.d->m.eps);
        else copy(to, from, s.d->m.hidden);
    }
}

// What fc reads: the normed features, or the embedding beside g.
void place_features(void* context, int64_t begin, int64_t end) {
    Step& s = *static_cast<Step*>(context);
    const Model& m = s.d->m;
    const Pairs& p = *m.pairs;
    int64_t part = p.feature_size / p.parts;
    for (int64_t n = begin; n < end; n++) {
        float* to = s.features + n * s.d->ldfeatures;
        const float* from = s.job->given + s.plan.index[n] * (p.token_norm ? p.feature_size : m.hidden);
        if (!p.token_norm) copy(to, s.h + n * s.d->ldh, m.hidden), copy(to + m.hidden, from, m.hidden);
        else if (!p.feature_norm) copy(to, from, p.feature_size);
        else
            for (int64_t at = 0; at < p.feature_size; at += part)
                kernels()->rmsnorm(from + at, p.feature_norm + at, to + at, part, m.eps);
    }
}

// The attention's inputs h and the residual x, from the embedding in h and g in x (EAGLE-1: both joined in x).
void pair_nodes(void* context, int64_t begin, int64_t end) {
    Step& s = *static_cast<Step*>(context);
    const Model& m = s.d->m;
    const Pairs& p = *m.pairs;
    for (int64_t n = begin; n < end; n++) {
        float *h = s.h + n * s.d->ldh, *x = s.x + n * s.d->ldx;
        if (!p.token_norm) {
            copy(h, x, m.hidden);
            continue;
        }
        if (s.job->fused) copy(x, s.job->given + s.plan.index[n] * m.hidden, m.hidden);
        kernels()->rmsnorm(h, p.token_norm, h, m.hidden, m.eps);
        kernels()->rmsnorm(x, p.hidden_norm, h + m.hidden, m.hidden, m.eps);
        if (p.normed_residual) copy(x, h + m.hidden, m.hidden);
    }
}

// Norms and rotations of the heads of a node, and its keys and values into their slot.
void place_nodes(void* context, int64_t begin, int64_t end) {
    Step& s = *static_cast<Step*>(context);
    const Model& m = s.d->m;
    const Kernels* k = kernels();
    for (int64_t n = begin; n < end; n++) {
        float* q = s.qkv + n * s.d->ldqkv;
        const float* cosine = s.angles + n * m.rotary;
        for (int64_t head = 0; head < m.heads + m.kv_heads; head++) {
            float* x = q + head * m.dim;
            const float* norm = head < m.heads ? s.layer->q_norm : s.layer->k_norm;
            if (norm) k->rmsnorm(x, norm, x, m.dim, m.eps);
            k->rope(x, cosine, cosine + m.rotary / 2, m.rotary);
        }
        int64_t row = s.job->rows[s.segment_of[n]];
        int32_t format = s.job->cache_format;
        for (int64_t head = 0; head < m.kv_heads; head++) {
            int64_t at = ((row * m.kv_heads + head) * s.job->capacity + s.plan.slot[n]) * vector_bytes(format, m.dim);
            k->pack_vectors(format, q + (m.heads + head) * m.dim, s.keys + at, 1, m.dim);
            k->pack_vectors(format, q + (m.heads + m.kv_heads + head) * m.dim, s.values + at, 1, m.dim);
        }
    }
}

void over_nodes(Work work, Step& s, int64_t count, double cost) {  // cost: microseconds per node, roughly
    int threads = static_cast<int>(cost * static_cast<double>(count) / 5) + 1;
    parallel(work, &s, count, threads);
}

void tap(const Step& s, int64_t which, const float* from, int64_t ld) {
    int64_t hidden = s.d->m.hidden, width = s.job->taps_count * hidden;
    for (int64_t n = 0; n < s.count; n++)
        copy(s.job->features + s.plan.index[n] * width + which * hidden, from + n * ld, hidden);
}

// Move the rows of some nodes to the front. which: ascending.
void gather(float* rows, int64_t ld, const int32_t* which, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (which[i] != i) copy(rows + i * ld, rows + which[i] * ld, ld);
}

// 0, or what is wrong: -1 - i: parents[i]; -2^40 - i: tokens[i] is no token.
int64_t forward(Decoder& d, const ForwardJob& job) {
    const Model& m = d.m;
    int64_t size = job.batch * job.nodes, all = job.batch * (job.held + job.nodes);
    d.ints.resize(static_cast<size_t>(2 * size + 3 * all + 5 * job.batch + 1));
    int32_t* next = d.ints.data();
    auto ints = [&](int64_t count) { return next += count, next - count; };
    Step s{};
    s.d = &d, s.job = &job;
    s.plan = {ints(size), ints(job.batch + 1), ints(job.batch), ints(all), ints(all), ints(all)};
    int32_t *segment_of = ints(size), *wanted = ints(job.batch), *entries = ints(job.batch), *begin = ints(job.batch);
    s.count = make_plan(job.batch, job.held, job.nodes, job.parents, job.lengths, s.plan);
    if (s.count < 0) return s.count;
    for (int64_t n = 0; n < s.count; n++) {
        int64_t token = job.tokens[s.plan.index[n]];
        if (token < 0 || token >= m.vocab) return -(int64_t(1) << 40) - s.plan.index[n];
    }
    for (int64_t b = 0; b < job.batch && !job.held; b++)
        if (s.plan.segment[b] == s.plan.segment[b + 1]) return -1 - b * job.nodes;  // nothing but padding
    for (int64_t b = 0; b < job.batch; b++)
        for (int64_t n = s.plan.segment[b]; n < s.plan.segment[b + 1]; n++) segment_of[n] = static_cast<int32_t>(b);
    s.segment_of = segment_of;
    int64_t T = s.count;
    s.x = d.x.need(T * d.ldx), s.h = d.h.need(T * d.ldh), s.qkv = d.qkv.need(T * d.ldqkv);
    s.angles = d.angles.need(T * m.rotary + 16);
    float *att = d.att.need(T * d.ldatt), *act = d.act.need(T * d.ldact);
    double width = static_cast<double>(m.hidden);

    Hot hot;
    over_nodes(start_nodes, s, T, width / 1e3 + static_cast<double>(m.rotary) / 50);
    if (const Pairs* p = m.pairs) {
        if (!job.fused || !p->token_norm) {
            s.features = d.features.need(T * d.ldfeatures);
            over_nodes(place_features, s, T, static_cast<double>(p->feature_size) / 8e3);
            LinearJob fc{.w = p->fc, .x = s.features, .y = s.x, .rows = T, .ldx = d.ldfeatures, .ldy = d.ldx};
            run_linear(fc);
        }
        over_nodes(pair_nodes, s, T, width / 4e3);
    }
    // Only the nodes that are asked for go through all of the last layer. The others leave their keys and values.
    bool rest = job.want == 2;
    for (int64_t t = 0; t < job.taps_count; t++) rest |= job.taps[t] == -1 || job.taps[t] == m.count - 1;
    int64_t some = 0;
    for (int32_t b = 0; b < job.batch && job.want == 1; b++)
        if (s.plan.segment[b] < s.plan.segment[b + 1]) entries[some] = b, wanted[some++] = s.plan.segment[b + 1] - 1;
    for (int64_t l = 0; l < m.count; l++) {
        const Layer& layer = m.layers[l];
        s.layer = &layer, s.keys = static_cast<uint8_t*>(job.cache[2 * l]), s.values = static_cast<uint8_t*>(job.cache[2 * l + 1]);
        s.weight = layer.norm1;
        if (!m.pairs) over_nodes(normalise, s, T, width / 8e3);
        LinearJob qkv{.w = layer.qkv, .x = s.h, .y = s.qkv, .rows = T, .ldx = d.ldh, .ldy = d.ldqkv};
        run_linear(qkv);
        over_nodes(place_nodes, s, T, static_cast<double>((m.heads + m.kv_heads) * m.dim) / 4e3);
        bool last = l + 1 == m.count && !rest;
        if (last && job.want == 0) return 0;
        AttentionJob a{};
        a.q = s.qkv, a.k = s.keys, a.v = s.values, a.out = att;
        a.segment = s.plan.segment, a.row = job.rows, a.length = job.lengths, a.chain = s.plan.chain;
        a.position = s.plan.position, a.slot = s.plan.slot, a.parent = s.plan.parent;
        a.segments = job.batch, a.heads = m.heads, a.kv_heads = m.kv_heads, a.dim = m.dim, a.value_dim = m.dim;
        a.capacity = job.capacity, a.ldq = d.ldqkv, a.ldo = d.ldatt, a.window = layer.window, a.scale = m.scale;
        a.format = job.cache_format;
        if (last) {  // the last node of each entry; one without nodes keeps its empty range
            for (int64_t b = 0, i = 0; b < job.batch; b++)
                begin[b] = i < some && entries[i] == b ? wanted[i++] : s.plan.segment[b + 1];
            a.begin = begin;
        }
        run_attention(a);
        if (last) {
            gather(att, d.ldatt, wanted, some);
            gather(s.x, d.ldx, wanted, some);
            T = some;
        }
        LinearJob out{.w = layer.out, .x = att, .y = s.x, .rows = T, .ldx = d.ldatt, .ldy = d.ldx, .factor = m.residual_factor,
                      .finish = ADD};
        run_linear(out);
        s.weight = layer.norm2;
        over_nodes(normalise, s, T, width / 8e3);
        LinearJob gate_up{.w = layer.gate_up, .x = s.h, .y = act, .rows = T, .ldx = d.ldh, .ldy = d.ldact, .finish = m.activation};
        run_linear(gate_up);
        LinearJob down{.w = layer.down, .x = act, .y = s.x, .rows = T, .ldx = d.ldact, .ldy = d.ldx,
                       .factor = m.residual_factor, .finish = ADD};
        run_linear(down);
        for (int64_t t = 0; t < job.taps_count; t++)
            if (job.taps[t] == l) tap(s, t, s.x, d.ldx);
    }
    s.weight = m.final_norm;
    for (int64_t t = 0; t < job.taps_count; t++)
        if (job.taps[t] == -1) {
            over_nodes(normalise, s, T, width / 8e3);
            tap(s, t, s.h, d.ldh);
        }
    if (job.want == 0) return 0;
    int64_t count = T;
    const int32_t* place = s.plan.index;  // rows of the logits; rows of padding are zeros
    int64_t shown = size;
    if (job.want == 1) {
        count = some, shown = job.batch, place = entries;
        s.which = rest ? wanted : nullptr;  // else they are in front already
    }
    over_nodes(normalise, s, count, width / 8e3);
    for (int64_t i = 0, n = 0; i < shown; i++)
        if (n < count && place[n] == i) n++;
        else std::memset(job.logits + i * m.head->n, 0, static_cast<size_t>(m.head->n) * 4);
    LinearJob head{.w = m.head, .x = s.h, .y = job.logits, .rows = count, .ldx = d.ldh, .ldy = m.head->n,
                   .factor = m.logits_factor, .place = place};
    run_linear(head);
    if (!m.pairs) return 0;
    for (int64_t i = 0; i < count; i++) {
        const float* x = s.x + (s.which ? s.which[i] : i) * d.ldx;
        copy(job.fed_back + place[i] * m.hidden, m.pairs->norm_output ? s.h + i * d.ldh : x, m.hidden);
    }
    return 0;
}

struct Choice {
    ChainJob* const* chains;
    const float* logits;
    const int64_t* ids;  // of the logits; null: 0, 1, 2...
    int64_t count;
};

// The chance that the target chooses the token with the largest key, if its logits are these plus Gumbel errors.
float chance(const Choice& all, const ChainJob& c, const float* logits, int64_t at) {
    float top[RIVALS], scale = (c.temperature > 0 ? c.temperature : 1.0f) / c.error, total = 0.0f;
    kernels()->top_keys(logits, all.ids, all.count, c.temperature, c.seed, c.stream, c.step,
                        c.position + static_cast<uint32_t>(c.made), at, 8.0f / scale, top);
    float chances[RIVALS];
    for (int64_t r = 0; r < RIVALS; r++) chances[r] = (top[r] - top[0]) * scale;
    kernels()->elementwise(0, chances, chances, RIVALS);
    for (float c : chances) total += c;
    return total > 0 ? 1.0f / total : 0.0f;  // NaN if no token is possible
}

// Each chain's next token; negative if its logits hold NaN.
void choose(void* context, int64_t begin, int64_t end) {
    const Choice& all = *static_cast<Choice*>(context);
    for (int64_t b = begin; b < end; b++) {
        ChainJob& c = *all.chains[b];
        const float* logits = all.logits + b * all.count;
        int64_t at = c.temperature > 0
                         ? kernels()->argmax_gumbel(logits, all.ids, all.count, c.temperature, c.seed, c.stream, c.step,
                                                    c.position + static_cast<uint32_t>(c.made))
                         : kernels()->argmax(logits, all.count);
        c.drafted[c.made] = at < 0 || !all.ids ? at : all.ids[at];
        if (at >= 0 && c.error > 0) c.alive *= c.chances[c.made] = chance(all, c, logits, at);
    }
}

}  // namespace

OUTRIDER_API void* outrider_decoder_new(const Model* model) { return new Decoder(*model); }
OUTRIDER_API void outrider_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

OUTRIDER_API int64_t outrider_forward(void* decoder, const ForwardJob* job) {
    Decoder& d = *static_cast<Decoder*>(decoder);
    std::lock_guard<std::mutex> guard(d.busy);
    return forward(d, *job);
}

// 0, or an error of `forward` whose entry is the number of a chain. Every chain asks for at least one token.
OUTRIDER_API int64_t outrider_draft_chains(void* decoder, const ChainsJob* asked) {
    Decoder& d = *static_cast<Decoder*>(decoder);
    std::lock_guard<std::mutex> guard(d.busy);
    Hot hot;
    std::vector<ChainJob*> live;
    int64_t nodes = 1;
    for (int64_t i = 0; i < asked->count; i++) {
        live.push_back(asked->chains + i);
        live[i]->made = 0, live[i]->alive = 1.0f;
        nodes = live[i]->count > nodes ? live[i]->count : nodes;
    }
    std::vector<int64_t> tokens(asked->count * nodes), parents(asked->count * nodes);
    std::vector<int32_t> rows(asked->count), lengths(asked->count);
    int64_t hidden = d.m.hidden, feature = d.m.pairs ? d.m.pairs->feature_size : 0;
    std::vector<float> given(asked->count * (nodes * feature > hidden ? nodes * feature : hidden) * (d.m.pairs != nullptr));
    for (; !live.empty(); nodes = 1) {
        int64_t batch = static_cast<int64_t>(live.size());
        for (int64_t b = 0; b < batch; b++) {
            const ChainJob& c = *live[b];
            bool first = c.made == 0;
            rows[b] = c.row, lengths[b] = first ? c.length : static_cast<int32_t>(c.length + c.count + c.made - 1);
            for (int64_t n = 0; n < nodes; n++) {
                tokens[b * nodes + n] = !first ? c.drafted[c.made - 1] : n < c.count ? c.tokens[n] : 0;
                parents[b * nodes + n] = n < (first ? c.count : 1) ? n - 1 : -2;
            }
            if (first && feature) copy(given.data() + b * nodes * feature, c.features, c.count * feature);
        }
        ForwardJob job{};
        job.tokens = tokens.data(), job.parents = parents.data(), job.rows = rows.data(), job.lengths = lengths.data();
        job.cache = asked->cache, job.logits = d.logits.need(batch * d.m.head->n);
        job.batch = batch, job.nodes = nodes, job.capacity = asked->capacity, job.want = 1;
        job.cache_format = asked->cache_format;
        job.given = given.data(), job.fused = live[0]->made > 0;
        job.fed_back = d.m.pairs ? d.fed_back.need(batch * hidden) : nullptr;
        int64_t error = forward(d, job);
        if (error) return error;
        Choice choice{live.data(), job.logits, d.m.head_ids, d.m.head->n};
        parallel(choose, &choice, batch, pool_threads());
        std::vector<ChainJob*> going;
        for (int64_t b = 0; b < batch; b++) {
            ChainJob* c = live[b];
            int64_t last = c->drafted[c->made];
            c->made += last >= 0;
            bool likely = c->error <= 0 || c->alive >= c->min_probability;
            if (last < 0 || !likely || c->made >= c->depth) continue;
            if (d.m.pairs) copy(given.data() + static_cast<int64_t>(going.size()) * hidden, job.fed_back + b * hidden, hidden);
            going.push_back(c);
        }
        live.swap(going);
    }
    return 0;
}

}  // namespace outrider
