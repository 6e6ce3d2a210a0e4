#include "plan.hpp"

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
    double keys = 0;
    for (int64_t s = 0; s < job.segments; s++) {
        double count = job.segment[s + 1] - first(s), span = job.length[s] + count / 2;
        if (job.window > 0 && span > static_cast<double>(job.window)) span = static_cast<double>(job.window);
        keys += count * span;
    }
    int threads = worth_threads(0, keys * static_cast<double>(job.heads * (job.dim + job.value_dim)) * 1.5);
    // As many nodes as possible share a pass over the keys, but every thread should find a few tasks.
    int64_t chunk = 32;
    auto count_tasks = [&] {
        int64_t n = 0;
        for (int64_t s = 0; s < job.segments; s++) n += (job.segment[s + 1] - first(s) + chunk - 1) / chunk;
        return n * job.kv_heads;
    };
    while (threads > 1 && chunk > 1 && count_tasks() < 3 * threads) chunk /= 2;
    thread_local std::vector<int32_t> segments, firsts;
    segments.clear(), firsts.clear();
    for (int64_t s = 0; s < job.segments; s++)
        for (int64_t n = first(s); n < job.segment[s + 1]; n += chunk) {
            segments.push_back(static_cast<int32_t>(s));
            firsts.push_back(static_cast<int32_t>(n));
        }
    job.chunk = chunk, job.task_segment = segments.data(), job.task_first = firsts.data();
    parallel(kernels()->attention, &job, static_cast<int64_t>(segments.size()) * job.kv_heads, threads);
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
