#include "plan.hpp"

#include <algorithm>
#include <vector>

#include "pool.hpp"

namespace outrider {

int64_t make_plan(int64_t batch, int64_t held, int64_t nodes, const int64_t* parents, const int32_t* lengths, Plan& plan) {
    int64_t total = 0, all = held + nodes;
    std::vector<int32_t> place(static_cast<size_t>(all));  // node -> index in the flattened arrays, -1 for padding
    for (int64_t b = 0; b < batch; b++) {
        plan.segment[b] = static_cast<int32_t>(total);
        plan.chain[b] = 1;
        for (int64_t n = 0; n < all; n++) {
            int64_t parent = parents ? parents[b * all + n] : n - 1;
            int32_t& here = place[static_cast<size_t>(n)];
            here = -1;
            if (parent == -2) continue;
            if (parent < -1 || parent >= n) return -1 - (b * all + n);
            int32_t above = parent < 0 ? -1 : place[static_cast<size_t>(parent)];
            if (parent >= 0 && above < 0) return -1 - (b * all + n);
            here = static_cast<int32_t>(n < held ? batch * nodes + b * held + n : total);
            plan.parent[here] = above;
            plan.position[here] = above < 0 ? lengths[b] : plan.position[above] + 1;
            plan.slot[here] = lengths[b] + static_cast<int32_t>(n);
            if (plan.slot[here] != plan.position[here]) plan.chain[b] = 0;
            if (n >= held) plan.index[total++] = static_cast<int32_t>(b * nodes + n - held);
        }
    }
    plan.segment[batch] = static_cast<int32_t>(total);
    return total;
}

void run_attention(AttentionJob& job) {
    auto first = [&](int64_t s) { return (job.begin ? job.begin : job.segment)[s]; };
    auto seen_from = [&](int64_t p) { return job.window > 0 && p >= job.window ? p - job.window + 1 : 0; };
    double keys = 0;
    int64_t whole = 0, longest = 1;  // chunks of the longest context that are full, and nodes of a segment
    job.chunks = 1;
    for (int64_t s = 0; s < job.segments; s++) {
        int64_t last = job.length[s];
        for (int64_t n = first(s); n < job.segment[s + 1]; n++) {
            int64_t p = job.position[n];
            keys += static_cast<double>(p + 1 - seen_from(p)), last = p > last ? p : last;
        }
        int64_t chunks = last / ATTENTION_SPAN - seen_from(job.length[s]) / ATTENTION_SPAN + 1;
        if (first(s) == job.segment[s + 1]) continue;
        if (chunks > job.chunks) job.chunks = chunks;
        whole = std::max(whole, (last + 1) / ATTENTION_SPAN - seen_from(job.length[s]) / ATTENTION_SPAN);
        longest = std::max<int64_t>(longest, job.segment[s + 1] - first(s));
    }
    int threads = worth_threads(0, keys * static_cast<double>(job.heads * (job.dim + job.value_dim)) * 1.5);
    int64_t group = job.heads / job.kv_heads, runs = 0;
    job.chunk = std::min(ATTENTION_NODES, longest), job.share = group, job.slices = 1, job.parts = nullptr;
    auto tasks = [&] {
        runs = 0;
        for (int64_t s = 0; s < job.segments; s++) runs += (job.segment[s + 1] - first(s) + job.chunk - 1) / job.chunk;
        return runs * job.kv_heads * ((group + job.share - 1) / job.share) * job.slices;
    };
    // As many nodes and heads as possible share a pass over the keys, but every thread should find a few tasks. First the context is
    // cut if that gives full chunks, then the nodes, then the heads of a group.
    constexpr int64_t MOST = 16 << 20;  // floats that a call leaves between its two phases
    const int64_t enough = 4 * threads, left = job.segment[job.segments] * job.heads * job.chunks * (2 + job.value_dim);
    if (threads > 1 && tasks() < enough && whole > 1 && left <= MOST) {
        int64_t wanted = (enough + tasks() - 1) / tasks();
        job.slice = (job.chunks + wanted - 1) / wanted, job.slices = (job.chunks + job.slice - 1) / job.slice;
    }
    while (threads > 1 && job.chunk > 1 && tasks() < 3 * threads) job.chunk = (job.chunk + 1) / 2;
    while (threads > 1 && job.share > 1 && tasks() < threads) job.share = (job.share + 1) / 2;
    thread_local std::vector<int32_t> segments, firsts;
    thread_local std::vector<float> parts;
    segments.clear(), firsts.clear();
    for (int64_t s = 0; s < job.segments; s++)
        for (int64_t n = first(s); n < job.segment[s + 1]; n += job.chunk) {
            segments.push_back(static_cast<int32_t>(s));
            firsts.push_back(static_cast<int32_t>(n));
        }
    job.task_segment = segments.data(), job.task_first = firsts.data();
    if (job.slices > 1) {
        if (static_cast<int64_t>(parts.size()) < left) parts.resize(static_cast<size_t>(left));
        job.parts = parts.data();
    }
    parallel(kernels()->attention, &job, tasks(), threads);
    if (job.parts) parallel(kernels()->attention_join, &job, runs * job.heads, worth_threads(0, static_cast<double>(left) * 4));
}

OUTRIDER_API int64_t outrider_plan(int64_t batch, int64_t held, int64_t nodes, const int64_t* parents,
                                   const int32_t* lengths, Plan* plan) {
    return make_plan(batch, held, nodes, parents, lengths, *plan);
}

OUTRIDER_API void outrider_pack_vectors(int32_t format, const float* from, uint8_t* to, int64_t count, int64_t dim) {
    kernels()->pack_vectors(format, from, to, count, dim);
}
OUTRIDER_API void outrider_attention(AttentionJob* job) { run_attention(*job); }

}  // namespace outrider
