// Prints a hash of the result of every native function, a line each. tests/native/witness.txt holds the lines; they are the same for
// every instruction set and every processor (tests/unit/kernels/test_witness.py).
//
// witness [INSTRUCTION_SET]: the processor's best, or the one that is named. Ends with 2 if the processor does not have it. The name of
// the set goes to stderr.
#include "inputs.hpp"

extern "C" {
const char* outrider_isa();
void outrider_words(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, int64_t n, uint32_t* out);
void outrider_gumbel_at(uint64_t seed, uint32_t stream, uint32_t step, uint32_t position, const int64_t* index, int64_t n, float* out);
int64_t outrider_argmax(const float* scores, int64_t n);
int64_t outrider_argmax_gumbel(const float* scores, const int64_t* ids, int64_t n, float temperature, uint64_t seed, uint32_t stream,
                               uint32_t step, uint32_t position);
void outrider_elementwise(int32_t function, const float* x, float* y, int64_t n);
void outrider_softmax(int32_t logarithm, const float* x, float* y, int64_t rows, int64_t n);
void outrider_log(const double* x, double* y, int64_t n);
void outrider_total(const double* x, double* y, int64_t rows, int64_t n);
void outrider_sine_cosine(const double* x, double* sine, double* cosine, int64_t n);
void outrider_scan(ScanJob*);
void outrider_route(const RouteJob*);
void outrider_experts(const ExpertsJob*);
}

namespace {

// FNV-1a (Fowler, Noll and Vo 1991) of the bytes.
template <class T>
void show(const std::string& name, const std::vector<T>& v) {
    uint64_t h = 14695981039346656037ull;
    for (size_t i = 0; i < v.size() * sizeof(T); i++) h = (h ^ reinterpret_cast<const uint8_t*>(v.data())[i]) * 1099511628211ull;
    std::printf("%-36s %016llx\n", name.c_str(), static_cast<unsigned long long>(h));
}

// Seventeen rows with outliers. Fewer rows have the same bits.
void show_matrix(const Packed& w, const std::string& name, Random& random) {
    constexpr int64_t ROWS = 17;
    std::vector<float> x = reals(ROWS * w.k, random), column(static_cast<size_t>(w.k));
    for (size_t i = 0; i < x.size(); i += 97) x[i] *= 30;
    outrider_unpack_column(&w, w.n - 1, column.data());
    show(name + ", a column", column);
    std::vector<float> all = product(w, x, 0, ROWS);
    show(name, all);
    for (int64_t rows : {1, 2, 5, 12}) {
        std::vector<float> some = product(w, x, 4, rows);
        expect(!std::memcmp(some.data(), all.data() + 4 * w.n, some.size() * sizeof(float)),
               name + ": other bits for " + std::to_string(rows) + " rows");
    }
}

// All bits of the weights set, and the largest inputs of either sign: the sums in 16 bits must hold them.
void show_extremes(int32_t format) {
    constexpr int64_t N = 16, K = 256, ROWS = 4;
    int64_t bytes = FILE_BYTES[format], blocks = K / (block_of(format).super ? SUPER : BLOCK);
    std::vector<uint8_t> raw(static_cast<size_t>(N * blocks * bytes), 0xff);
    for (int64_t i = 0; i < N * blocks; i++) {
        set_scales(format, raw.data() + i * bytes);
        if (format == Q8_0) std::memset(raw.data() + i * bytes + 2, 0x80, 32);
    }
    Matrix m(format, N, K);
    std::vector<int64_t> order;
    for (int64_t i = 0; i < N; i++) order.push_back(i);
    outrider_pack_rows(&m.packed, raw.data(), blocks * bytes, N, order.data(), 0, 0);
    for (float sign : {1.0f, -1.0f})
        show("format " + std::to_string(format) + ", extremes " + (sign > 0 ? "+" : "-"),
             product(m.packed, std::vector<float>(static_cast<size_t>(ROWS * K), sign), 0, ROWS));
}

void show_choices(Random& random) {
    constexpr int64_t N = 10001, KEPT = 1000;
    std::vector<uint32_t> words(N);
    outrider_words(7, 1, 3, 11, N, words.data());
    show("words", words);
    std::vector<float> noise(N), some(KEPT);
    outrider_gumbel(7, 0, 3, 11, N, noise.data());
    show("gumbel", noise);
    std::vector<int64_t> index, chosen;
    for (int64_t i = 0; i < KEPT; i++) index.push_back(i * 9 + i % 7);
    outrider_gumbel_at(9, 0, 3, 11, index.data(), KEPT, some.data());
    show("gumbel_at", some);
    for (uint32_t i = 0; i < 10; i++) {
        std::vector<float> scores = reals(4999, random, 4);
        chosen.push_back(outrider_argmax(scores.data(), 4999));
        chosen.push_back(outrider_argmax_gumbel(scores.data(), nullptr, 4999, 0.8f, 5, 0, i, 3));
        chosen.push_back(outrider_argmax_gumbel(scores.data(), index.data(), KEPT, 0.8f, 5, 0, i, 3));
    }
    show("argmax", chosen);
}

void show_numbers(Random& random) {
    constexpr int64_t N = 10002;
    const char* functions[] = {"exp", "log", "tanh"};
    std::vector<float> y(N);
    for (int32_t f = 0; f < 3; f++) {
        std::vector<float> x = reals(N, random, f == 0 ? 100.0f : 12.0f);
        if (f == 1)
            for (float& v : x) v = std::fabs(v) + 1e-6f;
        outrider_elementwise(f, x.data(), y.data(), N);
        show(functions[f], y);
    }
    std::vector<float> scores = reals(N, random, 20);
    scores[5] = scores[777] = -INFINITY;
    for (int32_t logarithm : {0, 1}) {
        outrider_softmax(logarithm, scores.data(), y.data(), 3, N / 3);
        show(logarithm ? "log_softmax" : "softmax", y);
    }
    std::vector<double> x, sine(N), cosine(N), sums(3);
    for (float v : reals(N, random)) x.push_back(static_cast<double>(v < 0 ? -v : v) * 1e-3);
    outrider_total(x.data(), sums.data(), 3, N / 3);
    show("total", sums);
    outrider_log(x.data(), sine.data(), N);
    show("log in double", sine);
    for (double& v : x) v *= 1e8 * v;  // angles up to 100,000, most of them small
    outrider_sine_cosine(x.data(), sine.data(), cosine.data(), N);
    show("sine", sine);
    show("cosine", cosine);
}

void show_scan(int32_t kind, Random& random) {
    constexpr int64_t NODES = 7, KEYS = 16;
    const int64_t heads = kind ? 40 : 3, width = kind ? 16 : 40, state = heads * width * (kind ? 1 : KEYS);
    std::vector<float> query = reals(NODES * heads * KEYS, random), key = reals(NODES * heads * KEYS, random, 0.2f);
    std::vector<float> value = reals(NODES * heads * width, random), step = reals(NODES * heads, random);
    std::vector<float> decay = reals(NODES * heads * KEYS, random), start = reals(state, random);
    for (float& d : decay) d = -std::fabs(d);
    for (float& s : step) s = std::fabs(s);
    const int64_t chains[] = {0, NODES};
    const float* starts[] = {start.data()};
    for (int32_t per_column : {0, 1}) {
        std::vector<float> work(static_cast<size_t>(state)), out(static_cast<size_t>(NODES * heads * width)), all[NODES];
        const float* records[NODES];
        float *states[NODES], *outs[NODES];
        ScanJob job{};
        for (int64_t n = 0; n < NODES; n++) {
            auto put = [&](int64_t& place, const std::vector<float>& from, int64_t count) {
                place = static_cast<int64_t>(all[n].size());
                all[n].insert(all[n].end(), from.begin() + n * count, from.begin() + (n + 1) * count);
            };
            put(job.query, query, kind ? width : heads * KEYS), put(job.key, key, kind ? width : heads * KEYS);
            put(job.value, value, kind ? heads : heads * width), put(job.step, step, heads);
            if (!kind) put(job.decay, decay, per_column ? heads * KEYS : heads);
            records[n] = all[n].data(), states[n] = work.data(), outs[n] = out.data() + n * heads * (kind ? 1 : width);
        }
        job.records = records, job.out = outs, job.states = states, job.starts = starts, job.chains = chains, job.count = 1;
        job.a = decay.data(), job.heads = heads, job.keys = kind ? 1 : KEYS, job.width = width, job.groups = kind ? 1 : heads;
        job.factor = 1, job.kind = kind, job.per_column = per_column;
        outrider_scan(&job);
        show(std::string(kind ? "selective" : "delta rule") + (per_column ? ", per column" : ""), out);
    }
}

// Nineteen rows through six experts, and some of them alone.
void show_experts(Random& random) {
    constexpr int64_t ROWS = 19, EXPERTS = 6, K = 2, HIDDEN = 256, MIDDLE = 256;
    std::vector<float> logits = reals(ROWS * EXPERTS, random, 3), routed(ROWS * 2 * K), x = reals(ROWS * HIDDEN, random), out(ROWS * HIDDEN);
    for (int32_t kind : {0, 1, 2}) {
        RouteJob route{logits.data(), routed.data(), nullptr, nullptr, ROWS, EXPERTS, 2 * K, EXPERTS, K, 3, 2, kind, 1, 1.5f, 1e-6f};
        outrider_route(&route);
        show("router " + std::to_string(kind), routed);
    }
    std::vector<Owned> made;
    std::vector<const Packed*> w;
    for (int32_t format : {Q4_K, MXFP4, FLOAT32, Q6_K, Q8_0, BFLOAT16})
        for (int64_t n : {2 * MIDDLE, HIDDEN}) made.push_back(random_matrix(format, n, HIDDEN, random)), w.push_back(&made.back()->packed);
    for (int32_t finish : {SWIGLU, GEGLU, CLAMPED}) {
        ExpertsJob job{w.data(), x.data(), routed.data(), out.data(), ROWS, HIDDEN, 2 * K, HIDDEN, EXPERTS, K, finish, 0, 1, 0.5f, 1.7f, 1};
        outrider_experts(&job);
        show("experts " + std::to_string(finish), out);
        std::vector<float> alone(HIDDEN);
        for (int64_t n : {0, 7, 18}) {
            job.x = x.data() + n * HIDDEN, job.routed = routed.data() + n * 2 * K, job.out = alone.data(), job.rows = 1;
            outrider_experts(&job);
            expect(!std::memcmp(alone.data(), out.data() + n * HIDDEN, HIDDEN * sizeof(float)), "experts: other bits alone");
        }
    }
}

void show_attention(Random& random) {
    for (int32_t format : {CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8})
        for (int64_t length : {0, 250, 3001})
            for (auto [window, softcap] : {std::pair<int64_t, float>{0, 0.0f}, {300, 4.0f}}) {
                Attention a(length, format, length % 2, random);
                std::string name = "attention " + std::to_string(format) + ", " + std::to_string(length) + (window ? ", window" : "");
                std::vector<float> out = a.run(window, softcap);
                show(name, out);
                if (length < 1000) a.check(out, window, softcap, name);
            }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !outrider_select_isa(argv[1])) return std::fprintf(stderr, "this processor has no %s\n", argv[1]), 2;
    std::fprintf(stderr, "%s\n", outrider_isa());
    outrider_set_threads(2);
    Random random, later;  // what came later does not change the lines of the rest
    for (int32_t format = 0; format < FORMATS; format++)
        for (auto [n, k] : {std::pair<int64_t, int64_t>{21, 512}, {16, 96}, {33, 331}}) {
            if (k % SUPER && quantised(format) && block_of(format).super) continue;
            if (k % BLOCK && quantised(format) && format != Q8_0 && format != Q4_0) continue;
            Random& draw = format < MXFP4 ? random : later;
            Owned m = random_matrix(format, n, k, draw);
            show_matrix(m->packed, "format " + std::to_string(format) + ", " + std::to_string(n) + " x " + std::to_string(k), draw);
        }
    for (int32_t format = Q8_0; format < FORMATS; format++) show_extremes(format);
    Owned a = random_matrix(Q4_K, 32, 256, random), b = random_matrix(Q6_K, 32, 256, random), c = random_matrix(FLOAT32, 21, 256, random);
    show_matrix(Matrix({&a->packed, &b->packed, &c->packed}, false).packed, "mixed", random);
    show_matrix(Matrix({&a->packed, &b->packed}, true).packed, "alternating", random);
    for (Reads reads : {TOKENS, EAGLE3, EAGLE1})
        for (int32_t format : {CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8}) {
            Toy toy(random, reads);
            if (reads == TOKENS) show("decoder, cache " + std::to_string(format), toy.text(format));
        }
    show_choices(random);
    show_numbers(random);
    for (int32_t kind : {DELTA_RULE, SELECTIVE}) show_scan(kind, random);
    show_experts(later);
    show_attention(later);
    Toy toy(later);
    for (int32_t format : {CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8}) show("draws, cache " + std::to_string(format), toy.drawn(format));
    show("truncate", truncated(later));
    return failures != 0;
}
