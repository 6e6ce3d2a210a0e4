// The C interface of everything but programs.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/mman.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "abi.hpp"
#include "angle.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "program.hpp"
#include "quant.hpp"

namespace outrider {
namespace {

// What this processor has, and its operating system lets us use.
uint32_t processor() {
    uint32_t has = 0;
#if defined(__x86_64__)
    // Not by __builtin_cpu_supports: it needs a runtime that not every compiler links. Bits: Intel's manual, volume 2, CPUID.
    unsigned a = 0, b = 0, c = 0, d = 0;
    auto bits = [](unsigned word, std::initializer_list<int> places) {
        for (int n : places)
            if (!(word >> n & 1)) return false;
        return true;
    };
    constexpr int FMA = 12, OSXSAVE = 27, F16C = 29;  // of leaf 1, c
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bits(c, {FMA, OSXSAVE, F16C})) return 0;
    unsigned kept = 0, high = 0;  // the registers that the operating system keeps
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    constexpr int AVX2 = 5, F = 16, DQ = 17, BW = 30, VL = 31, VNNI = 11;  // of leaf 7: b, and c for VNNI
    if (!bits(kept, {1, 2}) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bits(b, {AVX2})) return 0;
    has |= HAS_AVX2;
    if (bits(kept, {5, 6, 7}) && bits(b, {F, DQ, BW, VL})) has |= HAS_AVX512 | (bits(c, {VNNI}) ? HAS_AVX512_VNNI : 0u);
    constexpr int AVX_VNNI = 4;  // of leaf 7, part 1: a
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && bits(a, {AVX_VNNI})) has |= HAS_AVX_VNNI;
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long ASIMDDP = 1 << 20;  // a bit of AT_HWCAP (arch/arm64/include/uapi/asm/hwcap.h)
    if (getauxval(AT_HWCAP) & ASIMDDP) has |= HAS_DOTPROD;
#elif defined(__aarch64__) && defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    if (!sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) && found) has |= HAS_DOTPROD;
#endif
    return has;
}

// The fastest variant that runs here; with a name, that one or null.
const Variant* best(const char* name = nullptr) {
    uint32_t has = processor();
    for (const Variant* v = VARIANTS; v < VARIANTS + VARIANT_COUNT; v++)
        if ((v->needs & ~has) == 0 && (!name || !std::strcmp(v->name, name))) return v;
    return nullptr;
}

std::atomic<const Variant*> chosen{nullptr};

const Variant* variant() {
    const Variant* v = chosen.load(std::memory_order_relaxed);
    if (!v) chosen = v = best();
    return v;
}

}  // namespace

const Kernels* kernels() { return variant()->kernels; }

// The approximate work of one phase, in microseconds on one thread. Below SMALL a second thread costs more than it gains.
int worth_threads(double bytes, double multiply_adds) {
    constexpr double SMALL = 5;
    double time = bytes / 20e3 + multiply_adds / 40e3;
    int most = static_cast<int>(time / SMALL) + 1;
    return most < pool_threads() ? most : pool_threads();
}

void Needs::add(const Packed& w) {
    for (int32_t i = 0; i < w.count; i++) add(*w.parts[i]);
    if (w.format == MIXED) return;
    (!quantised(w.format) ? floats : block_of(w.format).wide() ? sixteen : eight) = true;
    bytes += static_cast<double>(w.panels) * static_cast<double>(w.panel_bytes);
}

namespace {

thread_local std::vector<uint8_t> eights, sixteens;  // the inputs of one linear; a caller runs one at a time

// Memory for the inputs of a linear of so many blocks: in 8 and in 16 bits, if the weights need them.
QuantiseJob room_of(const Needs& needs, int64_t blocks) {
    auto sized = [](std::vector<uint8_t>& buffer, int64_t count) {
        if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(static_cast<size_t>(count + count / 4));
        return buffer.data();
    };
    QuantiseJob job{};
    if (needs.eight) job.x8 = sized(eights, blocks * ROW8);
    if (needs.sixteen) job.x16 = sized(sixteens, blocks * ROW16);
    return job;
}

int64_t blocks_of(int64_t k) { return (k + SUPER - 1) / SUPER * (SUPER / BLOCK); }

struct HeadsWork {
    std::vector<Packed> w;
    std::vector<LinearJob> linears;
    std::vector<QuantiseJob> inputs;
    int64_t units;  // of a head

    static void multiply(void* context, int64_t begin, int64_t end) {
        HeadsWork& work = *static_cast<HeadsWork*>(context);
        for (int64_t i = begin; i < end; i++)
            kernels()->linear(&work.linears[static_cast<size_t>(i / work.units)], i % work.units, i % work.units + 1);
    }
    static void quantise(void* context, int64_t begin, int64_t end) {
        HeadsWork& work = *static_cast<HeadsWork*>(context);
        for (int64_t i = begin; i < end; i++) {
            QuantiseJob& input = work.inputs[static_cast<size_t>(i)];
            kernels()->quantise(&input, 0, blocks_of(input.k));
        }
    }
};

}  // namespace

void run_linear(LinearJob& job) {
    if (job.rows <= 0) return;
    const Packed& w = *job.w;
    Needs needs;
    needs.add(w);
    double bytes = needs.bytes;
    double work = static_cast<double>(job.rows) * static_cast<double>(w.n) * static_cast<double>(w.k);
    if (needs.eight || needs.sixteen) {
        int64_t blocks = blocks_of(w.k), size = blocks * job.rows;
        QuantiseJob inputs = room_of(needs, size);
        inputs.x = job.x, inputs.rows = job.rows, inputs.ldx = job.ldx, inputs.k = w.k;
        job.x8 = inputs.x8, job.x16 = inputs.x16;
        parallel(kernels()->quantise, &inputs, blocks, worth_threads(0, static_cast<double>(size) * 600));
    }
    parallel(kernels()->linear, &job, (w.panels + GROUP - 1) / GROUP, worth_threads(bytes, work));
}

void run_heads(const LinearJob& job, int64_t heads, int64_t from, int64_t to) {
    if (job.rows <= 0) return;
    const int64_t outputs = job.w->n / heads, panels = outputs / LANES, size = blocks_of(job.w->k) * job.rows;
    Needs needs;
    needs.add(*job.w);
    QuantiseJob room = room_of(needs, size * heads);
    HeadsWork work{std::vector<Packed>(static_cast<size_t>(heads), *job.w), {}, {}, (panels + GROUP - 1) / GROUP};
    for (int64_t h = 0; h < heads; h++) {
        Packed& own = work.w[static_cast<size_t>(h)];
        own.data += h * panels * own.panel_bytes, own.n = outputs, own.panels = static_cast<int32_t>(panels);
        LinearJob linear = job;
        linear.w = &own, linear.x += h * from, linear.y += h * to;
        QuantiseJob input{.x = linear.x, .rows = job.rows, .ldx = job.ldx, .k = own.k};
        if (room.x8) linear.x8 = input.x8 = room.x8 + h * size * ROW8;
        if (room.x16) linear.x16 = input.x16 = room.x16 + h * size * ROW16;
        work.linears.push_back(linear), work.inputs.push_back(input);
    }
    if (room.x8 || room.x16) parallel(HeadsWork::quantise, &work, heads, worth_threads(0, static_cast<double>(size * heads) * 600));
    double products = static_cast<double>(job.rows) * static_cast<double>(job.w->n) * static_cast<double>(job.w->k);
    parallel(HeadsWork::multiply, &work, heads * work.units, worth_threads(needs.bytes, products));
}

void run_scan(ScanJob& job) {
    double work = 4 * static_cast<double>(job.heads * job.keys * job.width) * static_cast<double>(job.chains[job.count]);
    parallel(kernels()->scan, &job, job.count * scan_units(job), worth_threads(0, work));
}

// What crosses the boundary, a line each. Of an enumeration name:0:end, and name:value:0 of each value; of a struct name:0:bytes, and
// name:offset:bytes of each field.
OUTRIDER_API const char* outrider_layout() {
    struct Place { const char* before; const char* name; size_t offset, bytes; };
    static const std::string text = [] {
        std::string out;
        for (const Place& p : {
#define ENUMERATION(E, end) Place{"\n", #E, 0, end},
#define VALUE(name) Place{" ", #name, name, 0},
#define STRUCT(S) Place{"\n", #S, 0, sizeof(S)},
#define FIELD(S, name) Place{" ", #name, offsetof(S, name), sizeof(S::name)},
#include "layout.inc"
             })
            out += p.before, out += p.name, out += ":" + std::to_string(p.offset) + ":" + std::to_string(p.bytes);
        return out;
    }();
    return text.c_str() + 1;
}

// The names of the variants that were compiled, the slowest first.
OUTRIDER_API const char* outrider_isas() {
    static const std::string text = [] {
        std::string out = VARIANTS[VARIANT_COUNT - 1].name;
        for (int64_t i = VARIANT_COUNT - 2; i >= 0; i--) out += std::string(" ") + VARIANTS[i].name;
        return out;
    }();
    return text.c_str();
}

OUTRIDER_API const char* outrider_isa() { return variant()->name; }

OUTRIDER_API int32_t outrider_select_isa(const char* name) {
    const Variant* v = best(name);
    if (v) chosen = v;
    return v != nullptr;
}

OUTRIDER_API void outrider_set_threads(int32_t threads) { set_pool_threads(threads); }
OUTRIDER_API void outrider_set_cores(const int32_t* cores, int64_t count) { set_pool_cores(cores, count); }
OUTRIDER_API int32_t outrider_threads() { return pool_threads(); }

OUTRIDER_API void outrider_linear(const Packed* w, const float* x, float* y, int64_t rows, int64_t ldx, int64_t ldy) {
    LinearJob job{.w = w, .x = x, .y = y, .rows = rows, .ldx = ldx, .ldy = ldy};
    complete(*w);
    run_linear(job);
}

OUTRIDER_API void outrider_unpack_column(const Packed* w, int64_t column, float* out) {
    complete(*w);
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
OUTRIDER_API void outrider_softmax(int32_t logarithm, const float* x, float* y, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) kernels()->softmax(logarithm, x + r * n, y + r * n, n);
}
OUTRIDER_API void outrider_log(const double* x, double* y, int64_t n) { kernels()->logarithm(x, y, n); }
OUTRIDER_API void outrider_total(const double* x, double* y, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) y[r] = kernels()->total(x + r * n, n);
}
OUTRIDER_API void outrider_sine_cosine(const double* x, double* sine, double* cosine, int64_t n) {
    for (int64_t i = 0; i < n; i++) sine_cosine(x[i], sine[i], cosine[i]);
}
OUTRIDER_API void outrider_scan(ScanJob* job) { run_scan(*job); }

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
