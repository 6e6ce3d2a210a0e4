// The C interface of everything but the fused decoder.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "abi.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "quant.hpp"

namespace outrider {
namespace {

const Kernels* supported(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);  // not every compiler's cpu_supports knows it
    bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni512 = avx512 && __builtin_cpu_supports("avx512vnni");
    bool vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);  // older compilers do not know its name
    if (!std::strcmp(name, "avx512_vnni")) return vnni512 ? avx512_vnni_kernels() : nullptr;
    if (!std::strcmp(name, "avx512")) return avx512 ? avx512_kernels() : nullptr;
    if (!std::strcmp(name, "avx_vnni")) return vnni ? avx_vnni_kernels() : nullptr;
    if (!std::strcmp(name, "avx2")) return avx2 ? avx2_kernels() : nullptr;
#endif
    return std::strcmp(name, "portable") ? nullptr : portable_kernels();
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels* kernels() {
    const Kernels* k = chosen.load(std::memory_order_relaxed);
    if (k) return k;
    for (const char* name : {"avx512_vnni", "avx512", "avx_vnni", "avx2", "portable"})
        if ((k = supported(name))) break;
    chosen = k;
    return k;
}

// The approximate work of one phase, in microseconds on one thread. Below SMALL a second thread costs more than it gains.
int worth_threads(double bytes, double multiply_adds) {
    constexpr double SMALL = 5;
    double time = bytes / 20e3 + multiply_adds / 40e3;
    int most = static_cast<int>(time / SMALL) + 1;
    return most < pool_threads() ? most : pool_threads();
}

namespace {

// What a matrix asks of its inputs, and its bytes.
struct Needs {
    bool eight = false, sixteen = false;
    double bytes = 0;

    explicit Needs(const Packed& w) { add(w); }
    void add(const Packed& w) {
        for (int32_t i = 0; i < w.count; i++) add(*w.parts[i]);
        if (w.format == MIXED) return;
        if (quantised(w.format)) (block_of(w.format).wide() ? sixteen : eight) = true;
        bytes += static_cast<double>(w.panels) * static_cast<double>(w.panel_bytes);
    }
};

thread_local std::vector<uint8_t> eights, sixteens;  // the inputs of one linear; a caller runs one at a time

}  // namespace

void run_linear(LinearJob& job) {
    if (job.rows <= 0) return;
    const Packed& w = *job.w;
    Needs needs(w);
    double bytes = needs.bytes;
    double work = static_cast<double>(job.rows) * static_cast<double>(w.n) * static_cast<double>(w.k);
    if (needs.eight || needs.sixteen) {
        int64_t blocks = (w.k + SUPER - 1) / SUPER * (SUPER / BLOCK), size = blocks * job.rows;
        QuantiseJob inputs{job.x, job.rows, job.ldx, w.k, nullptr, nullptr};
        auto room = [](std::vector<uint8_t>& buffer, int64_t count) {
            if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(static_cast<size_t>(count + count / 4));
            return buffer.data();
        };
        if (needs.eight) inputs.x8 = room(eights, size * ROW8);
        if (needs.sixteen) inputs.x16 = room(sixteens, size * ROW16);
        job.x8 = inputs.x8, job.x16 = inputs.x16;
        parallel(kernels()->quantise, &inputs, blocks, worth_threads(0, static_cast<double>(size) * 600));
    }
    parallel(kernels()->linear, &job, (w.panels + GROUP - 1) / GROUP, worth_threads(bytes, work));
}

OUTRIDER_API int32_t outrider_abi() { return 10; }

OUTRIDER_API const char* outrider_isa() { return kernels()->name; }

OUTRIDER_API int32_t outrider_select_isa(const char* name) {
    const Kernels* k = supported(name);
    if (k) chosen = k;
    return k != nullptr;
}

OUTRIDER_API void outrider_set_threads(int32_t threads) { set_pool_threads(threads); }
OUTRIDER_API void outrider_set_cores(const int32_t* cores, int64_t count) { set_pool_cores(cores, count); }
OUTRIDER_API int32_t outrider_threads() { return pool_threads(); }

OUTRIDER_API void outrider_linear(const Packed* w, const float* x, float* y, int64_t rows, int64_t ldx, int64_t ldy) {
    LinearJob job{w, x, y, rows, ldx, ldy, 1.0f, STORE, nullptr, nullptr, nullptr};
    run_linear(job);
}

OUTRIDER_API void outrider_unpack_column(const Packed* w, int64_t column, float* out) {
    kernels()->unpack_column(w, column, out, 1.0f);
}

OUTRIDER_API void outrider_words(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n,
                                 uint32_t* out) {
    kernels()->words(seed, stream, step, position, n, out);
}
OUTRIDER_API void outrider_gumbel(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n, float* out) {
    kernels()->gumbel(seed, stream, step, position, n, out);
}
OUTRIDER_API void outrider_gumbel_at(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position,
                                     const int64_t* index, int64_t n, float* out) {
    kernels()->gumbel_at(seed, stream, step, position, index, n, out);
}
OUTRIDER_API int64_t outrider_argmax(const float* scores, int64_t n) { return kernels()->argmax(scores, n); }
OUTRIDER_API int64_t outrider_argmax_gumbel(const float* scores, const int64_t* ids, int64_t n, float temperature,
                                            uint64_t seed, uint32_t stream, uint32_t step, uint32_t position) {
    return kernels()->argmax_gumbel(scores, ids, n, temperature, seed, stream, step, position);
}
OUTRIDER_API void outrider_scan(ScanJob* job) {
    double size = static_cast<double>(job->heads * (job->kind == SELECTIVE ? 1 : job->keys) * job->width);
    double work = 4 * size * static_cast<double>(job->chains[job->count]);
    parallel(kernels()->scan, job, job->count * scan_units(*job), worth_threads(0, work));
}

OUTRIDER_API void outrider_elementwise(int32_t function, const float* x, float* y, int64_t n) {
    kernels()->elementwise(function, x, y, n);
}

// Large pages save address translation on weights that are streamed. A hint; call before the memory is first touched.
OUTRIDER_API void outrider_advise_huge(void* memory, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = 2 << 20;
    uintptr_t from = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
    uintptr_t to = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / PAGE * PAGE;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

}  // namespace outrider
