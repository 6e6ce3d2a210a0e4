// Packs a weight matrix of a checkpoint into panels of 16 columns. Runs once per weight, at loading.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "abi.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace outrider {
namespace {

struct PackJob {
    Packed* to;
    const void* from;
    int32_t from_format;
    int64_t n, stride_n, stride_k;  // elements
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

int clamp(float x, int low, int high) {
    int q = static_cast<int>(std::nearbyintf(x));
    return q < low ? low : q > high ? high : q;
}

// The scale with the least rounding error, among a few near the smallest that holds the largest value. A group stores its scale as
// float16, so the error is measured with the float16 value.
uint16_t int4_scale(const float* w, int64_t n) {
    float peak = 0;
    for (int64_t i = 0; i < n; i++)
        if (std::fabs(w[i]) > std::fabs(peak)) peak = w[i];
    uint16_t best = 0;
    float least = INFINITY;
    for (float levels : {-8.0f, -7.5f, -7.0f, 7.0f, -8.6f, 7.6f}) {
        uint16_t half = to_half(peak / levels);
        float scale = from_half(half), error = 0;
        if (scale == 0 || !std::isfinite(scale)) continue;
        float inverse = 1 / scale;
        for (int64_t i = 0; i < n; i++) {
            float d = w[i] - scale * static_cast<float>(clamp(w[i] * inverse, -8, 7));
            error += d * d;
        }
        if (error < least) least = error, best = half;
    }
    return best;
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
        case INT8: {
            float peak = 0;
            for (int64_t k = 0; k < to.k; k++) {  // no fmax: gcc 12 for Arm fails on that reduction
                float size = std::fabs(element(j, n, k));
                if (size > peak) peak = size;
            }
            float scale = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
            to.scale[column] = scale;
            int8_t* out = reinterpret_cast<int8_t*>(panel) + lane;
            for (int64_t k = 0; k < to.k; k++)
                out[k * 16] = static_cast<int8_t>(clamp(element(j, n, k) * inverse, -127, 127));
            break;
        }
        case INT4:
            for (int64_t k0 = 0; k0 < to.k; k0 += INT4_GROUP) {
                uint8_t* group = panel + k0 / INT4_GROUP * (32 + INT4_GROUP * 8);
                float w[INT4_GROUP];
                int64_t count = to.k - k0 < INT4_GROUP ? to.k - k0 : INT4_GROUP;
                for (int64_t i = 0; i < count; i++) w[i] = element(j, n, k0 + i);
                uint16_t half = int4_scale(w, count);
                std::memcpy(group + 2 * lane, &half, 2);
                float scale = from_half(half), inverse = scale != 0 ? 1 / scale : 0;
                for (int64_t i = 0; i < count; i++) {
                    uint32_t q = static_cast<uint32_t>(clamp(w[i] * inverse, -8, 7) + 8);
                    uint32_t& word = reinterpret_cast<uint32_t*>(group + 32)[i / 8 * 16 + lane];
                    word = (word & ~(15u << (4 * (i % 8)))) | q << (4 * (i % 8));
                }
            }
            break;
    }
}

void pack_blocks(void* context, int64_t begin, int64_t end) {
    const PackJob& j = *static_cast<const PackJob*>(context);
    for (int64_t n = begin * LANES; n < end * LANES && n < j.n; n++) pack_column(j, n);
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
        case INT8: return k * 16;
        case INT4: return (k + INT4_GROUP - 1) / INT4_GROUP * (32 + INT4_GROUP * 8);
    }
    return -1;
}

OUTRIDER_API void outrider_pack(Packed* to, const void* from, int32_t from_format, int64_t n, int64_t stride_n,
                                int64_t stride_k, int64_t start, int32_t paired) {
    PackJob job{to, from, from_format, n, stride_n, stride_k, start, paired};
    parallel(pack_blocks, &job, (n + LANES - 1) / LANES, pool_threads());
}

}  // namespace outrider
