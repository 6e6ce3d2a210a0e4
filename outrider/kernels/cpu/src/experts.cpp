// Mixtures of experts. The rows are sorted by expert, and each expert that a row woke multiplies its rows in one go. A row's products
// are added up in its router's order. So its bits do not depend on the other rows.
#include <cstring>
#include <vector>

#include "abi.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "program.hpp"
#include "quant.hpp"

namespace outrider {
namespace {

constexpr float LOWEST = -__builtin_inff();

// The `count` largest of n numbers, the best first; of equal ones the first. NaN is never larger.
void best_of(const float* x, int64_t n, int64_t count, int32_t* which) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        if (held == count && !(x[i] > x[which[count - 1]])) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at > 0 && x[i] > x[which[at - 1]]; at--) which[at] = which[at - 1];
        which[at] = static_cast<int32_t>(i);
    }
}

// Leaves only the experts of the best groups. A group is as good as its best expert, or as its two best ones of a sigmoid's.
void keep_groups(const RouteJob& job, float* choice) {
    int64_t size = job.experts / job.groups;
    std::vector<float> worth;
    for (int64_t g = 0; g < job.groups; g++) {
        const float* own = choice + g * size;
        int32_t top[2];
        int64_t count = job.kind == SIGMOID_TOP && size > 1 ? 2 : 1;
        best_of(own, size, count, top);
        worth.push_back(count == 2 ? own[top[0]] + own[top[1]] : own[top[0]]);
    }
    std::vector<int32_t> order(static_cast<size_t>(job.groups));
    best_of(worth.data(), job.groups, job.groups, order.data());
    for (int64_t i = job.kept; i < job.groups; i++)
        for (int64_t e = 0; e < size; e++) choice[order[static_cast<size_t>(i)] * size + e] = LOWEST;
}

thread_local std::vector<float> scores;

void route(void* context, int64_t begin, int64_t end) {
    const RouteJob& job = *static_cast<const RouteJob*>(context);
    int64_t E = job.experts;
    scores.resize(static_cast<size_t>(2 * E));
    std::vector<int32_t> which(static_cast<size_t>(job.k));
    float *score = scores.data(), *choice = score + E;
    for (int64_t n = begin; n < end; n++) {
        const float* logits = job.logits + n * job.ldx;
        float *ids = job.out + n * job.ldo, *weights = ids + job.k;
        if (job.kind == SOFTMAX_TOP) {
            kernels()->softmax(0, logits, score, E);
        } else if (job.kind == SIGMOID_TOP) {
            for (int64_t e = 0; e < E; e++) score[e] = -logits[e];
            kernels()->elementwise(0, score, score, E);
            for (int64_t e = 0; e < E; e++) score[e] = 1.0f / (1.0f + score[e]);
        } else {
            std::memcpy(score, logits, static_cast<size_t>(E) * sizeof(float));
        }
        for (int64_t e = 0; e < E; e++) choice[e] = job.correction ? score[e] + job.correction[e] : score[e];
        if (job.groups > 1) keep_groups(job, choice);
        best_of(choice, E, job.k, which.data());
        for (int64_t i = 0; i < job.k; i++) ids[i] = static_cast<float>(which[i]), weights[i] = score[which[i]];
        if (job.kind == TOP_SOFTMAX) kernels()->softmax(0, weights, weights, job.k);
        float sum = job.added;
        for (int64_t i = 0; i < job.k; i++) sum += weights[i];
        for (int64_t i = 0; i < job.k; i++) weights[i] = (job.normalised ? weights[i] / sum : weights[i]) * job.factor;
        for (int64_t i = 0; i < job.k && job.scale; i++) weights[i] *= job.scale[which[i]];
    }
}

// The parts of several jobs as the units of one phase.
template <class Job>
struct Phase {
    void (*work)(void* job, int64_t begin, int64_t end);
    std::vector<Job> jobs;
    std::vector<int64_t> ends;  // of each job's units

    void add(const Job& job, int64_t units) { jobs.push_back(job), ends.push_back(units + (ends.empty() ? 0 : ends.back())); }
    static void run(void* context, int64_t begin, int64_t end) {
        Phase& p = *static_cast<Phase*>(context);
        for (size_t i = 0; i < p.jobs.size(); i++) {
            int64_t first = i ? p.ends[i - 1] : 0, from = begin > first ? begin : first, to = end < p.ends[i] ? end : p.ends[i];
            if (from < to) p.work(&p.jobs[i], from - first, to - first);
        }
    }
    void run(int threads) {
        if (!jobs.empty()) parallel(static_cast<Work>(run), this, ends.back(), threads);
    }
};

// An expert with rows. Its rows are `start` to start + rows of the sorted ones.
struct Woken {
    const Packed *gate_up, *down;
    int64_t start, rows;
};

// Memory of one mixture; a caller runs one at a time.
struct Room {
    std::vector<uint8_t> eights, sixteens;  // inputs in 8 and in 16 bits: of all nodes [node][block], then of the sorted rows
    std::vector<float> sorted, middle, each;
};
thread_local Room room;

template <class T>
T* sized(std::vector<T>& v, int64_t count) {
    if (static_cast<int64_t>(v.size()) < count) v.resize(static_cast<size_t>(count + count / 4));
    return v.data();
}

int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }  // rows that do not all map to the same cache sets
int64_t blocks_of(int64_t k) { return (k + SUPER - 1) / SUPER * (SUPER / BLOCK); }

// The inputs of the gate_up matrices. An expert with one row reads those of its node; others read sorted copies.
struct Inputs {
    const ExpertsJob* job;
    const std::vector<Woken>* woken;
    const int32_t *place, *owner;  // of a node's expert: its sorted row, and its number among the woken ones
    int64_t hidden, blocks;
    uint8_t *eights, *sixteens, *sorted8, *sorted16;  // null: not needed
    float* sorted;
    int64_t ldsorted;

    static void run(void* context, int64_t begin, int64_t end) {
        const Inputs& in = *static_cast<const Inputs*>(context);
        const ExpertsJob& job = *in.job;
        for (int64_t n = begin; n < end; n++) {
            const float* x = job.x + n * job.ldx;
            uint8_t* x8 = in.eights ? in.eights + n * in.blocks * ROW8 : nullptr;
            uint8_t* x16 = in.sixteens ? in.sixteens + n * in.blocks * ROW16 : nullptr;
            QuantiseJob own{.x = x, .rows = 1, .ldx = job.ldx, .k = in.hidden, .x8 = x8, .x16 = x16};
            if (x8 || x16) kernels()->quantise(&own, 0, in.blocks);
            for (int64_t i = n * job.k; i < (n + 1) * job.k; i++) {
                const Woken& w = (*in.woken)[static_cast<size_t>(in.owner[i])];
                if (w.rows == 1) continue;
                if (in.sorted) std::memcpy(in.sorted + in.place[i] * in.ldsorted, x, static_cast<size_t>(in.hidden) * sizeof(float));
                for (int64_t b = 0; b < in.blocks; b++) {
                    int64_t to = w.start * in.blocks + b * w.rows + in.place[i] - w.start;
                    if (x8) std::memcpy(in.sorted8 + to * ROW8, x8 + b * ROW8, ROW8);
                    if (x16) std::memcpy(in.sorted16 + to * ROW16, x16 + b * ROW16, ROW16);
                }
            }
        }
    }
};

// The activation of experts without a gate.
struct Squares {
    float* x;
    int64_t ldx, middle;

    static void run(void* context, int64_t begin, int64_t end) {
        const Squares& s = *static_cast<const Squares*>(context);
        for (int64_t n = begin; n < end; n++) kernels()->gate(RELU2, s.x + n * s.ldx, nullptr, s.x + n * s.ldx, s.middle);
    }
};

// Adds up the products of the rows.
struct Sum {
    const ExpertsJob* job;
    const int32_t* place;
    const float* each;
    int64_t ldeach, hidden;

    static void run(void* context, int64_t begin, int64_t end) {
        const Sum& s = *static_cast<const Sum*>(context);
        const ExpertsJob& job = *s.job;
        std::vector<const float*> rows(static_cast<size_t>(job.k));
        for (int64_t n = begin; n < end; n++) {
            for (int64_t i = 0; i < job.k; i++) rows[static_cast<size_t>(i)] = s.each + s.place[n * job.k + i] * s.ldeach;
            kernels()->weighted_sum(rows.data(), job.routed + n * job.ldr + job.k, job.k, job.factor, job.add,
                                    job.out + n * job.ldo, s.hidden);
        }
    }
};

}  // namespace

void run_routes(const RouteJob& job) {
    double work = static_cast<double>(job.rows * job.experts) * 100;
    parallel(route, const_cast<RouteJob*>(&job), job.rows, worth_threads(0, work));
}

void run_experts(const ExpertsJob& job) {
    if (job.rows <= 0) return;
    int64_t all = job.rows * job.k, hidden = job.w[1]->n, middle = job.w[1]->k;
    std::vector<int32_t> place(static_cast<size_t>(all)), owner(static_cast<size_t>(all)), first(static_cast<size_t>(job.experts));
    auto chosen = [&](int64_t i) { return static_cast<size_t>(job.routed[i / job.k * job.ldr + i % job.k]); };
    for (int64_t i = 0; i < all; i++) first[chosen(i)]++;
    std::vector<Woken> woken;
    std::vector<int32_t> number(static_cast<size_t>(job.experts));
    Needs up, down;
    int64_t sorted = 0;
    for (int64_t e = 0; e < job.experts; e++) {
        int64_t rows = first[static_cast<size_t>(e)];
        first[static_cast<size_t>(e)] = static_cast<int32_t>(sorted);
        if (!rows) continue;
        number[static_cast<size_t>(e)] = static_cast<int32_t>(woken.size());
        complete(*job.w[2 * e]), complete(*job.w[2 * e + 1]);
        woken.push_back({job.w[2 * e], job.w[2 * e + 1], sorted, rows});
        up.add(*woken.back().gate_up), down.add(*woken.back().down);
        sorted += rows;
    }
    for (int64_t i = 0; i < all; i++) {
        size_t e = chosen(i);
        place[static_cast<size_t>(i)] = first[e]++, owner[static_cast<size_t>(i)] = number[e];
    }

    int64_t blocks = blocks_of(hidden), after = blocks_of(middle), nodes = job.rows * blocks;
    auto rows_of = [](bool wanted, std::vector<uint8_t>& v, int64_t count) { return wanted ? sized(v, count) : nullptr; };
    int64_t most = all * (blocks > after ? blocks : after);  // the sorted rows before and after the activation take turns
    uint8_t* eights = rows_of(up.eight || down.eight, room.eights, (nodes + most) * ROW8);
    uint8_t* sixteens = rows_of(up.sixteen || down.sixteen, room.sixteens, (nodes + most) * ROW16);
    uint8_t *sorted8 = eights + (eights ? nodes * ROW8 : 0), *sorted16 = sixteens + (sixteens ? nodes * ROW16 : 0);
    int64_t ldx = padded(hidden), ldmiddle = padded(middle);
    Inputs inputs{&job, &woken, place.data(), owner.data(), hidden, blocks, up.eight ? eights : nullptr, up.sixteen ? sixteens : nullptr,
                  sorted8, sorted16, up.floats ? sized(room.sorted, all * ldx) : nullptr, ldx};
    parallel(Inputs::run, &inputs, job.rows, worth_threads(0, static_cast<double>(nodes) * 600 + static_cast<double>(all * hidden)));

    float *act = sized(room.middle, all * ldmiddle), *each = sized(room.each, all * ldx);
    std::vector<int32_t> node(woken.size());  // of an expert with one row
    for (int64_t i = 0; i < all; i++) node[static_cast<size_t>(owner[static_cast<size_t>(i)])] = static_cast<int32_t>(i / job.k);
    Phase<LinearJob> first_linears{kernels()->linear, {}, {}}, last_linears{kernels()->linear, {}, {}};
    Phase<QuantiseJob> quantise{kernels()->quantise, {}, {}};
    for (size_t i = 0; i < woken.size(); i++) {
        const Woken& w = woken[i];
        bool one = w.rows == 1;
        int64_t from = one ? node[i] * blocks : w.start * blocks;
        LinearJob linear{.w = w.gate_up, .x = one ? job.x + node[i] * job.ldx : inputs.sorted ? inputs.sorted + w.start * ldx : nullptr,
                         .y = act + w.start * ldmiddle, .rows = w.rows, .ldx = one ? job.ldx : ldx, .ldy = ldmiddle,
                         .finish = job.finish, .limit = job.limit, .slope = job.slope, .plus = job.plus};
        if (inputs.eights) linear.x8 = (one ? eights : sorted8) + from * ROW8;
        if (inputs.sixteens) linear.x16 = (one ? sixteens : sorted16) + from * ROW16;
        first_linears.add(linear, (w.gate_up->panels + GROUP - 1) / GROUP);
        LinearJob last{.w = w.down, .x = act + w.start * ldmiddle, .y = each + w.start * ldx, .rows = w.rows, .ldx = ldmiddle,
                       .ldy = ldx};
        QuantiseJob q{.x = last.x, .rows = w.rows, .ldx = ldmiddle, .k = middle};
        if (down.eight) last.x8 = q.x8 = sorted8 + w.start * after * ROW8;
        if (down.sixteen) last.x16 = q.x16 = sorted16 + w.start * after * ROW16;
        if (q.x8 || q.x16) quantise.add(q, after);
        last_linears.add(last, (w.down->panels + GROUP - 1) / GROUP);
    }
    double products = static_cast<double>(all * hidden) * static_cast<double>(middle);
    first_linears.run(worth_threads(up.bytes, 2 * products));
    Squares squares{act, ldmiddle, middle};
    if (job.finish == STORE) parallel(Squares::run, &squares, all, worth_threads(0, static_cast<double>(all * middle) * 4));
    quantise.run(worth_threads(0, static_cast<double>(all * after) * 600));
    last_linears.run(worth_threads(down.bytes, products));
    Sum sum{&job, place.data(), each, ldx, hidden};
    parallel(Sum::run, &sum, job.rows, worth_threads(0, static_cast<double>(all * hidden) * 4));
}

void run_route(Context& c, const Op& op) {
    run_routes({.logits = c.row(op.in, 0), .out = c.row(op.out, 0), .correction = op.p, .scale = op.q, .rows = c.count,
                .ldx = c.stride[op.in.reg], .ldo = c.stride[op.out.reg], .experts = op.in.width, .k = op.i[1], .groups = op.i[2],
                .kept = op.i[3], .kind = op.i[0], .normalised = op.flags & OP_NORMALISED, .factor = op.f[0], .added = op.f[1]});
}

void run_experts(Context& c, const Op& op) {
    bool clamped = op.f[0] > 0 || op.i[1] == SWISH, add = op.flags & OP_ADD;
    int32_t gated = clamped ? CLAMPED : op.i[1] == SILU ? SWIGLU : GEGLU;
    run_experts({.w = op.w, .x = c.row(op.in, 0), .routed = c.row(op.other, 0), .out = c.row(op.out, 0), .rows = c.count,
                 .ldx = c.stride[op.in.reg], .ldr = c.stride[op.other.reg], .ldo = c.stride[op.out.reg], .experts = op.count / 2,
                 .k = op.i[0], .finish = op.i[1] == RELU2 ? STORE : gated, .add = add, .factor = add ? op.f[3] : 1,
                 .limit = op.f[0] > 0 ? op.f[0] : -LOWEST, .slope = op.i[1] == SWISH ? op.f[1] : 1, .plus = op.f[2]});
}

OUTRIDER_API void outrider_route(const RouteJob* job) { run_routes(*job); }
OUTRIDER_API void outrider_experts(const ExpertsJob* job) { run_experts(*job); }

}  // namespace outrider
