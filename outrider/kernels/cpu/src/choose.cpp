// The token after a node, drawn by the sampling parameters, and the walk of `match` over a draft. The twins are
// outrider/core/sampling.py and outrider/verify/batched.py.
#include "choose.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "pool.hpp"

namespace outrider {

namespace {

constexpr float NO = -__builtin_inff();
constexpr int64_t SHORTLIST = 256;  // candidates of top-p that are sorted first

thread_local std::vector<float> scores, probs, best;

// The `count` largest numbers of x, descending, in `best`. Fewer, if the others are -inf.
void largest(const float* x, int64_t n, int64_t count) {
    float floor = NO;
    auto keep = static_cast<size_t>(count);
    auto cut = [&] {
        std::nth_element(best.begin(), best.begin() + count - 1, best.end(), std::greater<>());
        best.resize(keep), floor = best[keep - 1];
    };
    best.clear();
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] > floor)) continue;
        best.push_back(x[i]);
        if (best.size() >= 2 * keep + 64) cut();
    }
    if (best.size() > keep) cut();
    std::sort(best.begin(), best.end(), std::greater<>());
}

void keep_top_p(float* x, int64_t n, double top_p) {
    probs.resize(static_cast<size_t>(n));
    kernels()->softmax(0, x, probs.data(), n);
    int64_t kept = 0;
    for (int64_t count : {std::min(SHORTLIST, n), std::min(16 * SHORTLIST, n), n}) {
        double mass = 0;
        largest(probs.data(), n, count), kept = 0;
        for (float p : best) mass += p, kept += mass - p < top_p;  // the mass of the tokens ahead
        if (!(mass < top_p)) break;
    }
    if (best.empty()) return;  // NaN: the scores hold NaN or inf, or nothing else than -inf
    kept = std::max<int64_t>(kept, 1);
    float border = best[static_cast<size_t>(kept - 1)];
    int64_t equal = kept - std::count_if(probs.begin(), probs.end(), [&](float p) { return p > border; });
    for (int64_t i = 0; i < n; i++) {
        float p = probs[static_cast<size_t>(i)];
        if (!(p > border) && !(p == border && equal-- > 0)) x[i] = NO;
    }
}

// The token of a row of logits, or -1 if they hold NaN or inf, or nothing but -inf.
int64_t draw(const float* logits, int64_t n, const DrawJob& asked, uint32_t position) {
    int64_t top = kernels()->argmax(logits, n);
    if (top < 0 || !std::isfinite(logits[top])) return -1;
    if (!(asked.temperature > 0)) return top;
    float temperature = asked.temperature;
    if (asked.top_k > 0 || asked.top_p < 1 || asked.min_p > NO) {
        scores.resize(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; i++) scores[static_cast<size_t>(i)] = logits[i] / temperature;
        truncate(scores.data(), n, asked.top_k, asked.top_p, asked.min_p);
        logits = scores.data(), temperature = 1;
    }
    return kernels()->argmax_gumbel(logits, nullptr, n, temperature, asked.seed, asked.stream, asked.step, position);
}

struct Judging {
    const ForwardJob* job;
    DrawJob* draws;
    int64_t n;
};

// One entry after another: from the root to the child that is the drawn token, as long as there is one.
void judge(void* context, int64_t begin, int64_t end) {
    const Judging& work = *static_cast<const Judging*>(context);
    const ForwardJob& job = *work.job;
    for (int64_t b = begin; b < end; b++) {
        DrawJob& asked = work.draws[b];
        if (asked.by_host) continue;
        const int64_t *tokens = job.tokens + b * job.nodes, *parents = job.parents ? job.parents + b * job.nodes : nullptr;
        int64_t here = 0;
        for (asked.accepted = 0, asked.path[0] = 0;; asked.path[++asked.accepted] = here) {
            asked.token = draw(job.logits + (b * job.nodes + here) * work.n, work.n, asked,
                             asked.position + static_cast<uint32_t>(asked.accepted));
            int64_t child = here + 1;
            while (child < job.nodes && (tokens[child] != asked.token || (parents ? parents[child] : child - 1) != here)) child++;
            if (asked.token < 0 || child == job.nodes) break;
            here = child;
        }
    }
}

}  // namespace

void truncate(float* x, int64_t n, int64_t top_k, double top_p, float min_p) {
    auto below = [&](float border) {
        for (int64_t i = 0; i < n; i++)
            if (x[i] < border) x[i] = NO;
    };
    if (top_k > 0 && top_k < n) {
        largest(x, n, top_k);
        if (static_cast<int64_t>(best.size()) == top_k) below(best.back());
    }
    if (top_p < 1) keep_top_p(x, n, top_p);
    if (min_p > NO) below(*std::max_element(x, x + n) + min_p);
}

void judge_all(const ForwardJob& job, DrawJob* draws, int64_t n) {
    Judging work{&job, draws, n};
    parallel(judge, &work, job.batch, pool_threads());
}

OUTRIDER_API void outrider_truncate(float* x, int64_t n, int64_t top_k, double top_p, float min_p) {
    truncate(x, n, top_k, top_p, min_p);
}

}  // namespace outrider
