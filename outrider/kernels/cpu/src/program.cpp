// The interpreter of programs. Short parts run on the calling thread; the pool stays awake between phases.
#include "program.hpp"

#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "angle.hpp"
#include "choose.hpp"
#include "states.hpp"

namespace outrider {

namespace {

constexpr std::align_val_t ALIGNED{64};
constexpr int32_t OP_ANGLES = OPS;  // the op before the first: it fills the tables of angles

// A row length that is not a power of two: rows must not all map to the same cache sets.
int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }

void copy(float* to, const float* from, int64_t floats) { std::memcpy(to, from, static_cast<size_t>(floats) * 4); }

}  // namespace

Buffer::~Buffer() { ::operator delete(data_, ALIGNED); }

float* Buffer::need(int64_t floats) {
    if (floats > size_) {
        ::operator delete(data_, ALIGNED);
        data_ = nullptr;
        size_ = floats + floats / 4;
        data_ = static_cast<float*>(::operator new(static_cast<size_t>((size_ * 4 + 63) / 64 * 64), ALIGNED));
    }
    return data_;
}

namespace {

// Some ops that run in one go: a single one over all nodes, or several that go node by node.
struct Phase {
    size_t begin, end;
    bool by_node;
    double cost;  // microseconds a node
};

struct Interpreter {
    Program program;
    std::vector<Op> ops;
    std::vector<Phase> phases;
    std::vector<std::vector<int32_t>> live;  // by op, of those that narrow: registers that are read later
    std::mutex busy;
    std::vector<Buffer> registers, angles;
    std::vector<int64_t> stride;
    std::vector<float*> places, turns;
    std::vector<int32_t> ints;
    Buffer scratch, logits, fed_back;
    const Packed* head = nullptr;
    bool recurrent = false;
    int64_t fed = 0, feature = 0;  // numbers that a node feeds back, and that the caller gives to a fresh one

    explicit Interpreter(const Program& given);
};

// The ops of single nodes. n: the row.
using OfNode = void (*)(const Context&, const Op&, int64_t n);

void fill_angles(const Context& c, const Op& op, int64_t n) {
    const Angles* tables = reinterpret_cast<const Angles*>(op.p);
    for (int32_t t = 0; t < op.i[0]; t++) {
        const Angles& table = tables[t];
        int64_t half = table.half;
        float factor = table.factor[std::min(c.plan.position[n] / table.every, table.factors - 1)];
        float* angle = c.angles[t] + n * 2 * half;
        for (int64_t i = 0; i < half; i++) {
            double sine, cosine;
            sine_cosine(static_cast<double>(static_cast<float>(c.plan.position[n]) * table.inv_freq[i]), sine, cosine);
            angle[i] = static_cast<float>(cosine) * factor;
            angle[half + i] = static_cast<float>(sine) * factor;
        }
    }
}

void embed(const Context& c, const Op& op, int64_t n) {
    int64_t token = c.job->tokens[c.plan.index[n]];
    float* to = c.row(op.out, n);
    if (op.w) {
        kernels()->unpack_column(op.w[0], token, to, op.f[0]);
        return;
    }
    for (int64_t i = 0, at = token * op.out.width; i < op.out.width; i++, at++) {
        float v;
        if (op.i[0] == FLOAT32) {
            v = op.p[at];
        } else {
            uint16_t half = reinterpret_cast<const uint16_t*>(op.p)[at];
            uint32_t bits = static_cast<uint32_t>(half) << 16;
            std::memcpy(&v, &bits, 4);
            if (op.i[0] == FLOAT16) v = from_half(half);
        }
        to[i] = v * op.f[0];
    }
}

void norm(const Context& c, const Op& op, int64_t n) {
    const float* from = c.row(op.in, n);
    float* to = c.row(op.out, n);
    int64_t group = op.i[1] ? op.i[1] : op.in.width;
    for (int64_t at = 0; at < op.in.width; at += group) {
        int64_t own = op.flags & OP_PER_GROUP ? at : 0;
        kernels()->norm(from + at, op.p ? op.p + own : nullptr, op.q ? op.q + own : nullptr, to + at, group, op.f[0],
                        op.i[0] == LAYER_NORM, op.flags & OP_ADD);
    }
}

void rope(const Context& c, const Op& op, int64_t n) {
    int64_t rotary = op.i[3];
    const float* cosine = c.angles[op.i[0]] + c.node[n] * rotary;
    float* x = c.row(op.in, n);
    for (int64_t at = op.i[2]; at < op.in.width; at += op.i[1])
        kernels()->rope(x + at, cosine, cosine + rotary / 2, rotary, op.flags & OP_INTERLEAVED);
}

void store(const Context& c, const Op& op, int64_t n) {
    int64_t node = c.node[n], heads = op.i[1];
    int64_t cell = c.job->rows[c.segment_of[node]] * heads * c.job->capacity + c.plan.slot[node];
    int32_t format = c.job->cache_format;
    auto place = [&](int32_t part, const float* from, int64_t dim) {
        uint8_t* to = static_cast<uint8_t*>(c.job->cache[2 * op.i[0] + part]);
        int64_t bytes = vector_bytes(format, dim);
        for (int64_t h = 0; h < heads; h++)
            kernels()->pack_vectors(format, from + h * dim, to + (cell + h * c.job->capacity) * bytes, 1, dim);
    };
    place(0, c.row(op.in, n), op.i[2]);
    if (op.i[3]) place(1, c.row(op.other, n), op.i[3]);
}

void tap(const Context& c, const Op& op, int64_t n) {
    const ForwardJob& job = *c.job;
    for (int64_t t = 0; t < job.taps_count; t++)
        if (job.taps[t] == op.i[0])
            copy(job.features + (c.plan.index[c.node[n]] * job.taps_count + t) * op.in.width, c.row(op.in, n), op.in.width);
}

void give(const Context& c, const Op& op, int64_t n) {
    copy(c.row(op.out, n), c.job->given + c.plan.index[c.node[n]] * op.out.width, op.out.width);
}

// The ops of all nodes.
void linear(Context& c, const Op& op) {
    LinearJob job{.w = op.w[0], .x = c.row(op.in, 0), .y = c.row(op.out, 0), .rows = c.count, .ldx = c.stride[op.in.reg],
                  .ldy = c.stride[op.out.reg], .factor = op.f[0], .finish = op.i[0]};
    run_linear(job);
}

void heads(Context& c, const Op& op) {
    LinearJob job{.w = op.w[0], .x = c.row(op.in, 0), .y = c.row(op.out, 0), .rows = c.count, .ldx = c.stride[op.in.reg],
                  .ldy = c.stride[op.out.reg]};
    run_heads(job, op.i[0], op.i[1], op.i[2]);
}

void attend(Context& c, const Op& op) {
    AttentionJob a{};
    a.q = c.row(op.in, 0), a.k = c.job->cache[2 * op.i[0]], a.out = c.row(op.out, 0);
    a.v = op.flags & OP_SAME ? a.k : c.job->cache[2 * op.i[0] + 1];
    a.segment = c.plan.segment, a.row = c.job->rows, a.length = c.job->lengths, a.chain = c.plan.chain;
    a.position = c.plan.position, a.slot = c.plan.slot, a.parent = c.plan.parent;
    a.begin = c.begin, a.index = c.begin ? c.row_of : nullptr;
    a.segments = c.job->batch, a.heads = op.i[1], a.kv_heads = op.i[2], a.dim = op.i[3], a.value_dim = op.i[4];
    a.capacity = c.job->capacity, a.ldq = c.stride[op.in.reg], a.ldo = c.stride[op.out.reg];
    a.window = op.i[5], a.scale = op.f[0], a.softcap = op.f[1], a.sinks = op.p, a.format = c.job->cache_format;
    run_attention(a);
}

constexpr int64_t SLICE = 8192;  // logits of a unit of work

struct Capped {
    const Context* c;
    float* logits;
    int64_t n;
    float cap;
};

void cap_logits(void* context, int64_t begin, int64_t end) {
    const Capped& work = *static_cast<const Capped*>(context);
    int64_t slices = (work.n + SLICE - 1) / SLICE;
    for (int64_t i = begin; i < end; i++) {
        int64_t at = i % slices * SLICE, rest = work.n - at;
        kernels()->softcap(work.logits + work.c->place[i / slices] * work.n + at, rest < SLICE ? rest : SLICE, work.cap);
    }
}

void show(Context& c, const Op& op) {
    const ForwardJob& job = *c.job;
    int64_t shown = job.want == 1 ? job.batch : job.batch * job.nodes, n = op.w[0]->n;
    for (int64_t i = 0, at = 0; i < shown; i++)  // rows of padding are zeros
        if (at < c.count && c.place[at] == i) at++;
        else std::memset(job.logits + i * n, 0, static_cast<size_t>(n) * 4);
    LinearJob head{.w = op.w[0], .x = c.row(op.in, 0), .y = job.logits, .rows = c.count, .ldx = c.stride[op.in.reg], .ldy = n,
                   .factor = op.f[0], .place = c.place};
    run_linear(head);
    if (op.f[1] > 0) {
        Capped work{&c, job.logits, n, op.f[1]};
        parallel(cap_logits, &work, c.count * ((n + SLICE - 1) / SLICE), pool_threads());
    }
    for (int64_t i = 0; i < c.count && op.other.width; i++)
        copy(job.fed_back + c.place[i] * op.other.width, c.row(op.other, i), op.other.width);
}

void gate(const Context& c, const Op& op, int64_t n) {
    kernels()->gate(op.i[0], c.row(op.in, n), op.other.width ? c.row(op.other, n) : nullptr, c.row(op.out, n), op.in.width);
}

void map(const Context& c, const Op& op, int64_t n) {
    for (int32_t i = 0; i < op.i[1]; i++)
        kernels()->map(op.i[0], c.row(op.in, n) + i * op.i[2], op.p, op.q, op.f[0], c.row(op.out, n) + i * op.i[3], op.in.width);
}

struct Kind {
    OfNode of_node;
    void (*of_all)(Context&, const Op&);
    double cost;  // microseconds for a number of the input, of ops of nodes
};

Kind kind_of(const Op& op) {
    switch (op.kind) {
        case OP_ANGLES: return {fill_angles, nullptr, 0};
        case OP_EMBED: return {embed, nullptr, 1 / 1e3};
        case OP_NORM: return {norm, nullptr, 1 / 8e3};
        case OP_LINEAR: return {nullptr, linear, 0};
        case OP_HEADS: return {nullptr, heads, 0};
        case OP_ROPE: return {rope, nullptr, 1 / 4e3};
        case OP_STORE: return {store, nullptr, 0};
        case OP_ROUTE: return {nullptr, run_route, 0};
        case OP_EXPERTS: return {nullptr, run_experts, 0};
        case OP_ATTEND: return {nullptr, attend, 0};
        case OP_ROWS: return {op.flags & OP_TAP ? tap : nullptr, nullptr, 0};
        case OP_GIVEN: return {give, nullptr, 1 / 8e3};
        case OP_GATE: return {gate, nullptr, 1 / 2e3};
        case OP_MAP: return {map, nullptr, 1 / 2e3 * (op.i[1] ? op.i[1] : 1)};
        case OP_CONV: return {nullptr, run_conv, 0};
        case OP_SCAN: return {nullptr, run_scan, 0};
        case OP_HEAD: return {nullptr, show, 0};
    }
    return {nullptr, nullptr, 0};
}

bool reads(const Op& op, int32_t reg) {
    bool adds = op.flags & OP_ADD || (op.kind == OP_LINEAR && op.i[0] == ADD);
    return (op.in.width && op.in.reg == reg) || (op.other.width && op.other.reg == reg) || (adds && op.out.reg == reg);
}

Interpreter::Interpreter(const Program& given) : program(given), ops(1) {
    ops[0].kind = OP_ANGLES, ops[0].p = reinterpret_cast<const float*>(given.angles);
    ops[0].i[0] = static_cast<int32_t>(given.tables);
    ops.insert(ops.end(), given.ops, given.ops + given.count);
    live.resize(ops.size());
    for (size_t i = 0; i < ops.size(); i++) {
        const Op& op = ops[i];
        Kind kind = kind_of(op);
        double cost = kind.cost * (op.in.width ? op.in.width : op.out.width);
        for (int64_t t = 0; t < given.tables && op.kind == OP_ANGLES; t++) cost += given.angles[t].half / 25.0;
        bool by_node = kind.of_node != nullptr;
        if (by_node && i && phases.back().by_node) phases.back().end++, phases.back().cost += cost;
        else phases.push_back({i, i + 1, by_node, cost});
        if (op.kind == OP_ROWS && !by_node)
            for (int32_t r = 0; r < given.registers; r++)
                for (size_t later = i + 1; later < ops.size(); later++)
                    if (reads(ops[later], r)) {
                        live[i].push_back(r);
                        break;
                    }
        if (op.kind == OP_GIVEN && !(op.flags & OP_FED)) feature = op.out.width;
        recurrent |= op.kind == OP_CONV || op.kind == OP_SCAN;
        if (op.kind == OP_HEAD) head = op.w[0], fed = op.other.width;
    }
    registers.resize(static_cast<size_t>(given.registers)), angles.resize(static_cast<size_t>(given.tables));
    for (int64_t r = 0; r < given.registers; r++) stride.push_back(padded(given.width[r]));
}

struct NodesWork {
    const Context* c;
    const Op *begin, *end;
};

bool skipped(const Op& op, const ForwardJob& job) { return op.flags & (job.fused ? OP_FRESH : OP_FED); }

void run_nodes(void* context, int64_t begin, int64_t end) {
    const NodesWork& work = *static_cast<const NodesWork*>(context);
    for (int64_t n = begin; n < end; n++)
        for (const Op* op = work.begin; op < work.end; op++)
            if (!skipped(*op, *work.c->job)) kind_of(*op).of_node(*work.c, *op, n);
}

// Move the rows of the wanted nodes to the front, in the registers that are read later.
void narrow(Context& c, const std::vector<int32_t>& live, const int32_t* wanted, int64_t count) {
    for (int32_t r : live)
        for (int64_t i = 0; i < count; i++)
            if (wanted[i] != i) copy(c.registers[r] + i * c.stride[r], c.registers[r] + wanted[i] * c.stride[r], c.stride[r]);
    c.node = wanted, c.count = count;
}

bool tapped_later(const Interpreter& d, size_t from, const ForwardJob& job) {
    for (size_t i = from; i < d.ops.size(); i++)
        for (int64_t t = 0; t < job.taps_count && d.ops[i].flags & OP_TAP; t++)
            if (job.taps[t] == d.ops[i].i[0]) return true;
    return false;
}

// 0, or what is wrong: -1 - i: parents[i]; -2^40 - i: tokens[i] is no token; -2^50 - i: the states of entry i have not read its nodes.
int64_t forward(Interpreter& d, const ForwardJob& job) {
    int64_t size = job.batch * job.nodes, all = job.batch * (job.held + job.nodes);
    d.ints.resize(static_cast<size_t>(4 * size + 3 * all + 5 * job.batch + 1));
    int32_t* next = d.ints.data();
    auto ints = [&](int64_t count) { return next += count, next - count; };
    Context c{};
    c.job = &job, c.scratch = &d.scratch;
    c.plan = {ints(size), ints(job.batch + 1), ints(job.batch), ints(all), ints(all), ints(all)};
    int32_t *segment_of = ints(size), *order = ints(size), *row_of = ints(size);
    int32_t *wanted = ints(job.batch), *entries = ints(job.batch), *begin = ints(job.batch);
    const Plan& plan = c.plan;
    c.count = make_plan(job.batch, job.held, job.nodes, job.parents, job.lengths, c.plan);
    if (c.count < 0) return c.count;
    for (int64_t n = 0; n < c.count; n++) {
        int64_t token = job.tokens[plan.index[n]];
        if (token < 0 || token >= d.program.vocab) return -(int64_t(1) << 40) - plan.index[n];
        order[n] = static_cast<int32_t>(n);
    }
    int64_t some = 0;  // entries with nodes; the last node of each is wanted
    for (int32_t b = 0; b < job.batch; b++) {
        if (plan.segment[b] == plan.segment[b + 1] && !job.held) return -1 - b * job.nodes;  // nothing but padding
        for (int64_t n = plan.segment[b]; n < plan.segment[b + 1]; n++) segment_of[n] = b;
        begin[b] = plan.segment[b + 1];
        if (plan.segment[b] < plan.segment[b + 1]) {
            begin[b]--, row_of[begin[b]] = static_cast<int32_t>(some);
            entries[some] = b, wanted[some++] = begin[b];
        }
    }
    c.node = order, c.segment_of = segment_of, c.row_of = row_of, c.place = plan.index;
    d.places.clear(), d.turns.clear();
    for (size_t r = 0; r < d.registers.size(); r++) d.places.push_back(d.registers[r].need(c.count * d.stride[r]));
    for (size_t t = 0; t < d.angles.size(); t++) d.turns.push_back(d.angles[t].need(c.count * 2 * d.program.angles[t].half + 16));
    c.registers = d.places.data(), c.stride = d.stride.data(), c.angles = d.turns.data();

    if (d.recurrent) {
        c.states = static_cast<SlotStates*>(job.states);
        if (int64_t wrong = c.states ? c.states->begin(job, plan) : -1) return -(int64_t(1) << 50) + 1 + wrong;
    }
    Hot hot;
    for (const Phase& phase : d.phases) {
        const Op& op = d.ops[phase.begin];
        if (phase.by_node) {
            NodesWork work{&c, &op, d.ops.data() + phase.end};
            parallel(run_nodes, &work, c.count, static_cast<int>(phase.cost * static_cast<double>(c.count) / 5) + 1);
        } else if (op.kind == OP_ROWS) {
            if (job.want == 2 || c.begin || tapped_later(d, phase.end, job)) continue;
            if (job.want == 0) return 0;
            narrow(c, d.live[phase.begin], wanted, some);
            c.begin = begin, c.place = entries;
        } else if (!skipped(op, job)) {
            kind_of(op).of_all(c, op);
        }
    }
    return 0;
}

struct Choice {
    ChainJob* const* chains;
    const float* logits;
    const int64_t* ids;  // of the logits; null: 0, 1, 2...
    int64_t count;
};

// The chance that the target chooses the token with the largest key, if its logits are these plus Gumbel errors. Also told of the
// tokens with the next largest keys.
float chance(const Choice& all, const ChainJob& c, const float* logits, int64_t at) {
    int64_t indices[RIVALS];
    float top[RIVALS], scale = (c.temperature > 0 ? c.temperature : 1.0f) / c.error, total = 0.0f;
    kernels()->top_keys(logits, all.ids, all.count, c.temperature, c.seed, c.stream, c.step,
                        c.position + static_cast<uint32_t>(c.made), at, 8.0f / scale, top, indices);
    float chances[RIVALS];
    for (int64_t r = 0; r < RIVALS; r++) chances[r] = (top[r] - top[0]) * scale;
    kernels()->elementwise(0, chances, chances, RIVALS);
    for (float each : chances) total += each;
    float* told = c.chances + c.made * c.width;
    for (int64_t r = 0; r < c.width; r++) told[r] = total > 0 ? chances[r] / total : 0.0f;  // NaN if no token is possible
    for (int64_t r = 1; r < c.width; r++)
        c.siblings[c.made * (c.width - 1) + r - 1] = indices[r] < 0 || !all.ids ? indices[r] : all.ids[indices[r]];
    return told[0];
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
        if (at >= 0 && c.error > 0) c.alive *= chance(all, c, logits, at);
    }
}

}  // namespace

OUTRIDER_API void* outrider_program_new(const Program* program) { return new Interpreter(*program); }
OUTRIDER_API void outrider_program_free(void* program) { delete static_cast<Interpreter*>(program); }

OUTRIDER_API int64_t outrider_forward(void* program, const ForwardJob* job) {
    Interpreter& d = *static_cast<Interpreter*>(program);
    std::lock_guard<std::mutex> guard(d.busy);
    return forward(d, *job);
}

// `forward` of all nodes, and then what the draws make of its logits. 0, or an error of `forward`.
OUTRIDER_API int64_t outrider_step(void* program, const ForwardJob* job, DrawJob* draws) {
    Interpreter& d = *static_cast<Interpreter*>(program);
    std::lock_guard<std::mutex> guard(d.busy);
    Hot hot;
    int64_t error = forward(d, *job);
    if (!error) judge_all(*job, draws, d.head->n);
    return error;
}

// 0, or an error of `forward` whose entry is the number of a chain. Every chain asks for at least one token.
OUTRIDER_API int64_t outrider_draft_chains(void* program, const ChainsJob* asked) {
    Interpreter& d = *static_cast<Interpreter*>(program);
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
    int64_t feature = d.feature, fed = d.fed;
    std::vector<float> given(asked->count * (nodes * feature > fed ? nodes * feature : fed));
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
        job.cache = asked->cache, job.logits = d.logits.need(batch * d.head->n);
        job.batch = batch, job.nodes = nodes, job.capacity = asked->capacity, job.want = 1;
        job.cache_format = asked->cache_format;
        job.given = given.data(), job.fused = live[0]->made > 0;
        job.fed_back = d.fed_back.need(batch * fed);
        int64_t error = forward(d, job);
        if (error) return error;
        Choice choice{live.data(), job.logits, d.program.head_ids, d.head->n};
        parallel(choose, &choice, batch, pool_threads());
        std::vector<ChainJob*> going;
        for (int64_t b = 0; b < batch; b++) {
            ChainJob* c = live[b];
            int64_t last = c->drafted[c->made];
            c->made += last >= 0;
            bool likely = c->error <= 0 || c->alive >= c->min_probability;
            if (last < 0 || !likely || c->made >= c->depth) continue;
            if (fed) copy(given.data() + static_cast<int64_t>(going.size()) * fed, job.fed_back + b * fed, fed);
            going.push_back(c);
        }
        live.swap(going);
    }
    return 0;
}

}  // namespace outrider
