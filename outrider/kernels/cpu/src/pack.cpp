// Packs a weight matrix of a checkpoint into panels of 16 columns. Runs once per weight, at loading.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <mutex>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "abi.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "quant.hpp"

namespace outrider {
namespace {

struct PackJob {
    Packed* to;
    const void* from;
    int32_t from_format;
    int64_t n, stride_n, stride_k;  // elements
    int64_t row_bytes;              // of a quantised source
    const int64_t* order;           // of its rows; or null
    int64_t start;                  // first column of `to`
    int32_t paired;                 // 1: blocks of 16 columns go to every second panel (gate and up side by side)
};

float as_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
uint32_t as_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

uint16_t to_half(float f) {  // round to nearest even
    uint32_t bits = as_bits(f), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and up
    if (bits < 0x38800000u) {                                              // subnormal: let the addition round
        return static_cast<uint16_t>(sign | (as_bits(as_float(bits) + 0.5f) - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13));
}

uint16_t to_bfloat(float f) {  // round to nearest even
    uint32_t bits = as_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float element(const PackJob& j, int64_t n, int64_t k) {
    int64_t at = n * j.stride_n + k * j.stride_k;
    if (j.from_format == FLOAT32) return static_cast<const float*>(j.from)[at];
    uint16_t h = static_cast<const uint16_t*>(j.from)[at];
    return j.from_format == BFLOAT16 ? as_float(static_cast<uint32_t>(h) << 16) : from_half(h);
}

float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // to even, for |x| < 2^22; compilers make vectors of it

// The scale with the least rounding error for 4 bits, among a few near the smallest that holds the largest value. It is stored as
// float16, so the error is measured with the float16 value.
uint16_t scale_of_4_bits(const float* w) {
    float peak = 0;
    for (int64_t i = 0; i < BLOCK; i++)
        if (std::fabs(w[i]) > std::fabs(peak)) peak = w[i];
    uint16_t best = 0;
    float least = INFINITY;
    for (float levels : {-8.0f, -7.5f, -7.0f, 7.0f, -8.6f, 7.6f}) {
        uint16_t half = to_half(peak / levels);
        float scale = from_half(half), sums[8] = {};
        if (scale == 0 || !std::isfinite(scale)) continue;
        float inverse = 1 / scale;
        for (int64_t i = 0; i < BLOCK; i += 8)
            for (int64_t l = 0; l < 8; l++) {
                float q = nearest(w[i + l] * inverse);
                q = q < -8 ? -8 : q > 7 ? 7 : q;
                float d = w[i + l] - scale * q;
                sums[l] += d * d;
            }
        float error = 0;
        for (float x : sums) error += x;
        if (error < least) least = error, best = half;
    }
    return best;
}

// One unit of one output, as its format stores it.
struct Unit {
    uint8_t q[SUPER];
    uint16_t d[2], m[2];      // as the panel keeps them; for "K" formats only the first
    int8_t scales[16], minima[16];
};

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

void low_then_high(const uint8_t* from, int64_t n, uint8_t* q) {  // n bytes: their low halves, then their high halves
    for (int64_t i = 0; i < n; i++) q[i] = from[i] & 15, q[n + i] = from[i] >> 4;
}

// ggml's block of 32 inputs (ggml-common.h): float16 scale, perhaps float16 minimum, perhaps 32 high bits, the low bits. MXFP4 has
// the exponent of its scale in one byte.
void read_small(int32_t format, const uint8_t* from, Unit& to, int64_t b) {
    uint8_t* q = to.q + b * BLOCK;
    if (format == MXFP4) {  // the values are doubled: half of 2^(e - 127)
        to.d[b] = static_cast<uint16_t>(*from < 2 ? 0x20 << *from : (*from - 1) << 7);
        return low_then_high(from + 1, 16, q);
    }
    constexpr uint8_t none[2] = {};
    bool min = block_of(format).min;
    to.d[b] = half_at(from), to.m[b] = half_at(min ? from + 2 : none);
    from += min ? 4 : 2;
    if (format == Q8_0) {
        std::memcpy(q, from, BLOCK);
    } else if (block_of(format).extra) {
        uint32_t high;
        std::memcpy(&high, from, 4);
        low_then_high(from + 4, 16, q);
        for (int64_t i = 0; i < BLOCK; i++) q[i] |= static_cast<uint8_t>((high >> i & 1) << 4);
    } else {
        low_then_high(from, 16, q);
    }
}

// ggml's block of 256 inputs.
void read_super(int32_t format, const uint8_t* from, Unit& to) {
    auto six_bits = [&](const uint8_t* s) {  // 8 scales and 8 minima in 12 bytes
        for (int i = 0; i < 8; i++) {
            to.scales[i] = static_cast<int8_t>(i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4);
            to.minima[i] = static_cast<int8_t>(i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4);
        }
    };
    auto negative = [](uint16_t half) { return static_cast<uint16_t>(half ^ 0x8000u); };  // ggml subtracts its minima
    switch (format) {
        case Q2_K:
            for (int i = 0; i < 16; i++)
                to.scales[i] = static_cast<int8_t>(from[i] & 15), to.minima[i] = static_cast<int8_t>(from[i] >> 4);
            for (int i = 0; i < SUPER; i++) to.q[i] = from[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            to.d[0] = half_at(from + 80), to.m[0] = negative(half_at(from + 82));
            break;
        case Q3_K:
            for (int i = 0; i < SUPER; i++) {
                int low = from[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, high = from[i % 32] >> (i / 32) & 1;
                to.q[i] = static_cast<uint8_t>(low | high << 2);
            }
            for (int i = 0; i < 16; i++) {
                const uint8_t* s = from + 96;
                int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
                to.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
            }
            to.d[0] = half_at(from + 108);
            break;
        case Q4_K:
        case Q5_K:
            to.d[0] = half_at(from), to.m[0] = negative(half_at(from + 2));
            six_bits(from + 4);
            for (int i = 0; i < 4; i++) low_then_high(from + (format == Q4_K ? 16 : 48) + 32 * i, 32, to.q + 64 * i);
            if (format == Q5_K)
                for (int i = 0; i < SUPER; i++) to.q[i] |= static_cast<uint8_t>((from[16 + i % 32] >> (i / 32) & 1) << 4);
            break;
        case Q6_K:
            for (int i = 0; i < SUPER; i++) {
                int half = i / 128, quarter = i % 128 / 32, l = i % 32;
                int low = from[64 * half + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
                to.q[i] = static_cast<uint8_t>(low | (from[128 + 32 * half + l] >> (2 * quarter) & 3) << 4);
            }
            std::memcpy(to.scales, from + 192, 16);
            to.d[0] = half_at(from + 208);
            break;
        case IQ4_XS:
            to.d[0] = half_at(from);
            for (int i = 0; i < 8; i++) {
                int low = from[4 + i / 2] >> (i % 2 * 4) & 15, high = half_at(from + 2) >> (2 * i) & 3;
                to.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
                low_then_high(from + 8 + 16 * i, 16, to.q + 32 * i);
            }
            break;
    }
}

int64_t block_bytes(int32_t format) {  // in the file
    switch (format) {
        case Q8_0: return 34;
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        case IQ4_NL: return 18;
        case IQ4_XS: return 136;
        case MXFP4: return 17;
    }
    return 0;
}

// Puts a unit of one output into its panel. unit: where the panel's unit starts.
void place(int32_t format, const Unit& from, uint8_t* unit, int64_t lane) {
    const Block B = block_of(format);
    auto word = [&](int64_t k) {
        uint32_t w;
        std::memcpy(&w, from.q + k, 4);
        return w;
    };
    for (int64_t b = 0; b < B.blocks(); b++) {
        uint8_t* planes = unit + B.planes(b) + 4 * lane;
        if (B.base == 6) {
            for (int64_t p = 0; p < 2; p++)
                for (int64_t v = 0; v < 3; v++) {
                    uint32_t w = word(b * BLOCK + 16 * p + 4 * v);
                    w |= (word(b * BLOCK + 16 * p + 12) >> (2 * v) & 0x03030303u) << 6;
                    std::memcpy(planes + 64 * (3 * p + v), &w, 4);
                }
            continue;
        }
        uint32_t mask = 0x01010101u * ((1u << B.base) - 1);
        int per = 8 / B.base;  // quads of a vector
        for (int v = 0; v < 8 / per; v++) {
            uint32_t w = 0;
            for (int i = 0; i < per; i++) w |= (word(b * BLOCK + 4 * (per * v + i)) & mask) << (B.base * i);
            std::memcpy(planes + 64 * v, &w, 4);
        }
        per = B.extra ? 8 / B.extra : 8;
        for (int v = 0; v < B.extra; v++) {
            uint32_t w = 0;
            for (int i = 0; i < per; i++)
                w |= (word(b * BLOCK + 4 * (per * v + i)) >> B.base & 0x01010101u * ((1u << B.extra) - 1)) << (B.extra * i);
            std::memcpy(planes + 64 * (B.base + v), &w, 4);
        }
    }
    for (int64_t b = 0; b < B.blocks(); b++) {
        uint8_t *scales = unit + B.scales(b), *minima = unit + B.minima(b);
        if (!B.super) {
            std::memcpy(scales + 2 * lane, from.d + b, 2);
            if (B.min) std::memcpy(minima + 2 * lane, from.m + b, 2);
        }
        for (int64_t i = 0, of = b * BLOCK / B.sub; i < BLOCK / B.sub && B.super; i++, of++) {
            scales[16 * i + lane] = static_cast<uint8_t>(from.scales[of]);
            if (B.min) minima[16 * i + lane] = static_cast<uint8_t>(from.minima[of]);
        }
    }
    if (B.super) std::memcpy(unit + 2 * lane, from.d, 2);
    if (B.super && B.min) std::memcpy(unit + 32 + 2 * lane, from.m, 2);
}

// Rounds 32 weights to 8 or to 4 bits.
void quantise_block(int32_t format, const float* w, Unit& to, int64_t b) {
    float peak = 0;
    for (int64_t i = 0; i < BLOCK; i++) {  // no fmax: gcc 12 for Arm fails on that reduction
        float size = std::fabs(w[i]);
        if (size > peak) peak = size;
    }
    to.d[b] = format == Q8_0 ? to_half(peak / 127) : scale_of_4_bits(w);
    float scale = from_half(to.d[b]), inverse = scale != 0 && std::isfinite(scale) ? 1 / scale : 0;
    float top = format == Q8_0 ? 127 : 7, bottom = format == Q8_0 ? -127 : -8, zero = format == Q8_0 ? 0 : 8;
    for (int64_t i = 0; i < BLOCK; i++) {
        float q = nearest(w[i] * inverse);
        q = (q < bottom ? bottom : q > top ? top : q) + zero;
        to.q[b * BLOCK + i] = static_cast<uint8_t>(static_cast<int>(q));
    }
}

void pack_quantised(const PackJob& j, int64_t n, int64_t column) {
    const Packed& to = *j.to;
    const Block B = block_of(to.format);
    uint8_t* panel = to.data + column / LANES * to.panel_bytes;
    const uint8_t* row = static_cast<const uint8_t*>(j.from) + (j.order ? j.order[n] : n) * j.row_bytes;
    for (int64_t k0 = 0; k0 < to.k; k0 += B.inputs(), panel += B.bytes()) {
        Unit unit{};
        int64_t blocks = std::min(B.blocks(), (to.k - k0 + BLOCK - 1) / BLOCK);
        if (B.zero) std::memset(unit.q, B.zero, sizeof unit.q);  // blocks past the end
        if (j.row_bytes && B.super) {
            read_super(to.format, row + k0 / SUPER * block_bytes(to.format), unit);
        } else if (j.row_bytes) {
            for (int64_t b = 0; b < blocks; b++) read_small(to.format, row + (k0 / BLOCK + b) * block_bytes(to.format), unit, b);
        } else {
            for (int64_t b = 0; b < blocks; b++) {
                float w[BLOCK] = {};
                for (int64_t i = 0; i < std::min(BLOCK, to.k - k0 - b * BLOCK); i++) w[i] = element(j, n, k0 + b * BLOCK + i);
                quantise_block(to.format, w, unit, b);
            }
        }
        place(to.format, unit, panel, column % LANES);
    }
}

void pack_column(const PackJob& j, int64_t n) {
    Packed& to = *j.to;
    int64_t column = j.start + (j.paired ? n / LANES * 2 * LANES + n % LANES : n), lane = column % LANES;
    uint8_t* panel = to.data + column / LANES * to.panel_bytes;
    switch (to.format) {
        case FLOAT32:
            for (int64_t k = 0; k < to.k; k++) reinterpret_cast<float*>(panel)[k * 16 + lane] = element(j, n, k);
            break;
        case BFLOAT16: {
            int64_t place = lane < 8 ? 2 * lane : 2 * (lane - 8) + 1;
            uint16_t* out = reinterpret_cast<uint16_t*>(panel) + place;
            for (int64_t k = 0; k < to.k; k++) out[k * 16] = to_bfloat(element(j, n, k));
            break;
        }
        case FLOAT16: {
            uint16_t* out = reinterpret_cast<uint16_t*>(panel) + lane;
            for (int64_t k = 0; k < to.k; k++) out[k * 16] = to_half(element(j, n, k));
            break;
        }
        default: pack_quantised(j, n, column);
    }
}

void pack_blocks(void* context, int64_t begin, int64_t end) {
    const PackJob& j = *static_cast<const PackJob*>(context);
    for (int64_t n = begin * LANES; n < end * LANES && n < j.n; n++) pack_column(j, n);
}

// Gives the pages of a mapped file back to the system. They come again when they are read.
void let_go(const Rows& rows) {
#if defined(__unix__) || defined(__APPLE__)
    uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), from = reinterpret_cast<uintptr_t>(rows.from);
    uintptr_t begin = from / page * page;
    madvise(reinterpret_cast<void*>(begin), from + static_cast<uintptr_t>(rows.row_bytes * rows.n) - begin, MADV_DONTNEED);
#else
    (void)rows;
#endif
}

}  // namespace

float from_half(uint16_t h) {
    uint32_t magnitude = (h & 0x7fffu) << 13;
    uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0;
    return as_float(as_bits(as_float(magnitude) * 0x1p112f) | special | (h & 0x8000u) << 16);
}

OUTRIDER_API int64_t outrider_panel_bytes(int32_t format, int64_t k) {
    switch (format) {
        case FLOAT32: return k * 64;
        case BFLOAT16:
        case FLOAT16: return k * 32;
    }
    if (!quantised(format) || format >= FORMATS) return -1;
    const Block B = block_of(format);
    return (k + B.inputs() - 1) / B.inputs() * B.bytes();
}

OUTRIDER_API void outrider_pack(Packed* to, const void* from, int32_t from_format, int64_t n, int64_t stride_n,
                                int64_t stride_k, int64_t start, int32_t paired) {
    PackJob job{to, from, from_format, n, stride_n, stride_k, 0, nullptr, start, paired};
    parallel(pack_blocks, &job, (n + LANES - 1) / LANES, pool_threads());
}

// from: n rows of ggml's blocks, in the format of `to`. order: [n] or null.
OUTRIDER_API void outrider_pack_rows(Packed* to, const void* from, int64_t row_bytes, int64_t n, const int64_t* order,
                                     int64_t start, int32_t paired) {
    PackJob job{to, from, to->format, n, 0, 0, row_bytes, order, start, paired};
    parallel(pack_blocks, &job, (n + LANES - 1) / LANES, pool_threads());
}

void complete(const Packed& w) {
    for (int32_t i = 0; i < w.count; i++) complete(*w.parts[i]);
    if (!__atomic_load_n(&w.unread, __ATOMIC_ACQUIRE)) return;
    static std::mutex busy;
    std::lock_guard<std::mutex> guard(busy);
    const Rows* rows = w.unread;
    if (!rows) return;  // another thread has packed it meanwhile
    Packed& to = const_cast<Packed&>(w);
    for (int64_t i = 0; i < w.unread_count; i++)
        outrider_pack_rows(&to, rows[i].from, rows[i].row_bytes, rows[i].n, nullptr, i * LANES, w.unread_count == 2);
    __atomic_store_n(&to.unread, nullptr, __ATOMIC_RELEASE);
    for (int64_t i = 0; i < w.unread_count; i++) let_go(rows[i]);
}

OUTRIDER_API void outrider_complete(const Packed* w) { complete(*w); }

// The weights of one output, as ggml's own dequantisation gives them (times factor).
void unpack_quantised(const Packed* w, int64_t column, float* out, float factor) {
    const Block B = block_of(w->format);
    const uint8_t* unit = w->data + column / LANES * w->panel_bytes;
    int64_t lane = column % LANES;
    for (int64_t k0 = 0; k0 < w->k; k0 += B.inputs(), unit += B.bytes())
        for (int64_t i = 0; i < std::min(B.inputs(), w->k - k0); i++) {
            int64_t b = i / BLOCK, j = i % BLOCK / 4, at = 4 * lane + i % 4, per = 8 / B.base;
            const uint8_t *planes = unit + B.planes(b) + at, *scales = unit + B.scales(b), *minima = unit + B.minima(b);
            int q;
            if (B.base == 6) {
                const uint8_t* three = planes + 192 * (j / 4);
                q = j % 4 < 3 ? three[64 * (j % 4)] & 63 : three[0] >> 6 | three[64] >> 6 << 2 | three[128] >> 6 << 4;
            } else {
                q = planes[64 * (j / per)] >> (j % per * B.base) & ((1 << B.base) - 1);
            }
            if (B.extra) {
                per = 8 / B.extra;
                q |= (planes[64 * (B.base + j / per)] >> (j % per * B.extra) & ((1 << B.extra) - 1)) << B.base;
            }
            if (B.table) q = B.table[q];
            if (B.base == 8) q = static_cast<int8_t>(q);
            float scale, minimum = 0;
            if (B.super) {
                int64_t s = i % BLOCK / B.sub * 16 + lane;
                scale = from_half(half_at(unit + 2 * lane)) * static_cast<float>(static_cast<int8_t>(scales[s]));
                if (B.min) minimum = from_half(half_at(unit + 32 + 2 * lane)) * static_cast<float>(static_cast<int8_t>(minima[s]));
            } else {
                uint16_t stored = half_at(scales + 2 * lane);
                scale = B.powers ? as_float(static_cast<uint32_t>(stored) << 16) : from_half(stored);
                if (B.min) minimum = from_half(half_at(minima + 2 * lane));
            }
            float value = scale * static_cast<float>(q - B.zero);
            out[k0 + i] = (B.min ? value + minimum : value) * factor;
        }
}

}  // namespace outrider
