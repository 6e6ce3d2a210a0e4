// Runs every native function on small random inputs, on every instruction set, and with several callers at once.
// For the sanitizers (`make sanitize`): buffers have just the size that they need. Results are compared, too: a row has the bits
// that it has alone, on any instruction set, for any number of threads. Ends with 1 and names what differs.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "inputs.hpp"

namespace {

void check_matrix(const Packed& w, const std::string& name, Random& random) {
    constexpr int64_t ROWS = 99;
    std::vector<float> x = reals(ROWS * w.k, random), all, row(static_cast<size_t>(w.k));
    for (int64_t column : {int64_t(0), w.n - 1}) outrider_unpack_column(&w, column, row.data());
    for (int64_t v = 0; v < VARIANT_COUNT; v++) {
        const char* isa = VARIANTS[v].name;
        if (!outrider_select_isa(isa)) continue;
        std::vector<float> y = product(w, x, 0, ROWS);
        if (all.empty()) all = y;
        expect(same(all, y), name + ": other bits on " + isa);
        for (int64_t rows : {1, 2, 3, 5, 8, 12, 13, 25}) {
            std::vector<float> some = product(w, x, 7, rows);
            expect(!std::memcmp(some.data(), all.data() + 7 * w.n, some.size() * sizeof(float)),
                   name + ": other bits for " + std::to_string(rows) + " rows on " + isa);
        }
    }
}

// Several callers need a matrix that is not packed yet. Its pages have zeros once they are given back, so it must not be read twice.
// What is proposed after a text does not depend on how it was read. Few kinds of tokens, so that there are many matches.
void check_lookup(Random& random) {
    auto text = [&](size_t most) {
        std::vector<int32_t> out(2 + random.next() % most);
        for (int32_t& token : out) token = static_cast<int32_t>(random.next() >> 40) % 20;
        return out;
    };
    std::vector<int32_t> tokens = text(300), all = text(400), order(tokens.size());
    tokens.back() = 0x7fffffff;
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int32_t>(i);
    std::vector<int32_t> back(tokens.rbegin(), tokens.rend());
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return std::lexicographical_compare(back.begin() + a, back.end(), back.begin() + b, back.end());
    });
    Segment segment{tokens.data(), order.data(), static_cast<int64_t>(tokens.size())};
    Segments corpus{&segment, 1};
    constexpr int64_t NODES = 12;
    struct Tree {
        std::vector<int32_t> tokens = std::vector<int32_t>(NODES + 1), parents = tokens;
        std::vector<double> masses = std::vector<double>(NODES + 1);
        bool operator==(const Tree&) const = default;
    };
    auto read = [&](size_t piece) {
        Tree tree;
        void* lookup = outrider_lookup_new();
        for (size_t at = 0; at < all.size(); at += piece) {
            std::vector<int32_t> some(all.begin() + at, all.begin() + std::min(at + piece, all.size()));
            LookupJob job{};
            job.unread = some.data(), job.unread_count = static_cast<int64_t>(some.size());
            job.corpora = &corpus, job.corpora_count = 1, job.forced = tokens.data(), job.forced_count = 2;
            job.depth = 6, job.width = 3, job.nodes = NODES, job.least = 0.01, job.doubt = 2;
            tree = {};
            job.tokens = tree.tokens.data(), job.parents = tree.parents.data(), job.masses = tree.masses.data();
            outrider_lookup(lookup, &job);
            expect(job.made > 1, "something is proposed");
        }
        outrider_lookup_free(lookup);
        return tree;
    };
    expect(read(1) == read(all.size()) && read(7) == read(1), "a lookup depends on how its text was read");
}

void check_unread(Random& random) {
    constexpr int64_t N = 48, K = 512, ROWS = 3;
    std::vector<uint8_t> raw = random_blocks(Q4_K, N, K, random);
    std::vector<float> x = reals(ROWS * K, random);
    Matrix packed(Q4_K, N, K);
    outrider_pack_rows(&packed.packed, raw.data(), static_cast<int64_t>(raw.size()) / N, N, nullptr, 0, 0);
    std::vector<float> wanted = product(packed.packed, x, 0, ROWS);
    for (int turn = 0; turn < 20; turn++) {
        Matrix later(Q4_K, N, K);
        void* pages = mmap(nullptr, raw.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        std::memcpy(pages, raw.data(), raw.size());
        Rows rows{static_cast<uint8_t*>(pages), static_cast<int64_t>(raw.size()) / N, N};
        later.packed.unread = &rows, later.packed.unread_count = 1;
        std::atomic<int> wrong{0};
        std::vector<std::thread> callers;
        for (int i = 0; i < 4; i++) callers.emplace_back([&] { wrong += !same(product(later.packed, x, 0, ROWS), wanted); });
        for (std::thread& t : callers) t.join();
        expect(wrong == 0 && !later.packed.unread, "a matrix that is packed when it is needed has other bits");
        munmap(pages, raw.size());
    }
}

}  // namespace

int main() {
    Random random;
    outrider_set_threads(3);
    for (int32_t format = 0; format < FORMATS; format++) {
        for (auto [n, k] : {std::pair<int64_t, int64_t>{37, 512}, {16, 96}, {65, 331}}) {
            if (k % SUPER && quantised(format) && block_of(format).super) continue;
            if (k % BLOCK && quantised(format) && format != Q8_0 && format != Q4_0) continue;
            Owned m = random_matrix(format, n, k, random);
            check_matrix(m->packed, "format " + std::to_string(format) + ", k " + std::to_string(k), random);
        }
    }
    Owned a = random_matrix(Q4_K, 32, 256, random), b = random_matrix(Q6_K, 32, 256, random), c = random_matrix(FLOAT32, 21, 256, random);
    check_matrix(Matrix({&a->packed, &b->packed, &c->packed}, false).packed, "mixed", random);
    check_matrix(Matrix({&a->packed, &b->packed}, true).packed, "alternating", random);

    for (int32_t format : {CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8}) {
        Toy toy(random);
        std::vector<float> first;
        std::vector<int64_t> chosen;
        for (int64_t v = 0; v < VARIANT_COUNT; v++) {
            const char* isa = VARIANTS[v].name;
            if (!outrider_select_isa(isa)) continue;
            for (int threads : {1, 2, 5}) {
                outrider_set_threads(threads);
                std::vector<float> text = toy.text(format);
                std::vector<int64_t> drawn = toy.drawn(format);
                if (first.empty()) first = text, chosen = drawn;
                expect(same(first, text) && drawn == chosen, std::string("a text on ") + isa + " with " + std::to_string(threads) + " threads");
            }
        }
    }

    for (int32_t format : {CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8})
        for (int64_t length : {0, 1, 255, 256, 777, 2050})
            for (auto [window, softcap] : {std::pair<int64_t, float>{0, 0.0f}, {300, 4.0f}}) {
                Attention a(length, format, length % 2, random);
                std::vector<float> first;
                for (int64_t v = 0; v < VARIANT_COUNT; v++) {
                    if (!outrider_select_isa(VARIANTS[v].name)) continue;
                    for (int threads : {1, 3}) {
                        outrider_set_threads(threads);
                        std::vector<float> out = a.run(window, softcap);
                        if (first.empty()) first = out;
                        std::string name = "attention over " + std::to_string(length) + " on " + VARIANTS[v].name;
                        expect(same(first, out), name + ": other bits");
                        if (length < 1000 || !v) a.check(out, window, softcap, name + ": other bits for fewer rows");
                    }
                }
            }

    Random other;
    Toy second(other);
    std::vector<float> expected = second.text(CACHE_FLOAT32), x = reals(9 * 512, random);
    Owned shared = random_matrix(Q5_K, 200, 512, random);
    std::vector<float> wanted = product(shared->packed, x, 0, 9);
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int i = 0; i < 4; i++)
        callers.emplace_back([&, i] {
            for (int turn = 0; turn < 20; turn++) {
                if (i % 2) wrong += !same(product(shared->packed, x, 0, 9), wanted);
                else wrong += !same(second.text(CACHE_FLOAT32), expected);
            }
        });
    for (std::thread& t : callers) t.join();
    expect(wrong == 0, "callers at the same time disturb each other");

    check_unread(random);
    for (int i = 0; i < 20; i++) check_lookup(random);

    std::vector<float> noise(101);
    outrider_gumbel(7, 0, 3, 11, 101, noise.data());
    for (float g : noise) expect(std::isfinite(g), "noise is finite");
    std::printf(failures ? "%d failures\n" : "all equal\n", failures);
    return failures != 0;
}
