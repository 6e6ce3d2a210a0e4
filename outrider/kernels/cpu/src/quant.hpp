// Quantised weights: what each format stores, and where a panel keeps it. Shared by packing and by the kernels.
//
// A weight is scale * (q - zero) + minimum. q is an integer of 2 to 8 bits. Scale and minimum belong to 16 or 32 inputs of one
// output. The formats are ggml's. A panel holds 16 outputs, cut into units of 64 inputs, or 256 for the "K" formats. A unit lies in
// the order in which it is read, because a processor fetches ahead what is read in order:
//
//   factors  "K" formats only: float16 [16] of scales, the same of minima
//   scales   64 bytes, of one, two or four blocks of 32 inputs; see `Block`
//   values   of these blocks: a plane of the low bits, then a plane of the high bits
//
// A plane consists of vectors of 64 bytes. Byte 4 o + i belongs to output o and to input 4 j + i of quad j. So 4 bytes of an
// activation meet 16 outputs. With 8 bits a vector holds one quad. With 4 bits it holds quads 2 v and 2 v + 1, in the low and the
// high half of a byte. With 2 bits it holds four quads, with 1 bit eight. With 6 bits three vectors hold four quads: the low bits of
// each are one, and the high 2 bits of all three, the lowest first, are the fourth.
#pragma once
#include "abi.hpp"

namespace outrider {

constexpr int64_t BLOCK = 32;     // inputs that share one scale of the activations
constexpr int64_t SUPER = 256;    // inputs of one unit of a "K" format
constexpr int64_t ROW8 = 64;      // bytes of one row's block of activations in 8 bits: see Row8
constexpr int64_t ROW16 = 80;     // in 16 bits: see Row16

// The values of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl), and of MXFP4: those of four bits e2m1, doubled, plus 16.
alignas(16) constexpr int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t FLOATS4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct Block {
    int base, extra;  // bits of the two planes
    int zero;         // a power of two, subtracted from q; or 0
    int sub;          // inputs that share a scale
    bool super;       // scales are integers under one float16 for 256 inputs; else float16 for each 32
    bool min;         // there are minima, kept as the scales are
    const int8_t* table = nullptr;  // q is an index into it
    bool powers = false;            // scales are powers of two, kept as bfloat16 and not as float16

    constexpr int64_t blocks() const { return super ? SUPER / BLOCK : 2; }  // of a unit
    constexpr int64_t inputs() const { return blocks() * BLOCK; }
    constexpr int64_t values() const { return 64 * (base + extra); }  // bytes of a block
    // Scales of a block, then its minima. super: int8 [BLOCK / sub][16] each. Else: float16 [16] each.
    constexpr int64_t own() const { return (super ? BLOCK / sub * 16 : 32) * (min ? 2 : 1); }
    constexpr int64_t together() const { return 64 / own(); }  // blocks that share a line of scales
    constexpr int64_t line(int64_t b) const { return (super ? 64 : 0) + b / together() * (64 + together() * values()); }
    constexpr int64_t scales(int64_t b) const { return line(b) + b % together() * own(); }
    constexpr int64_t minima(int64_t b) const { return scales(b) + own() / 2; }
    constexpr int64_t planes(int64_t b) const { return line(b) + 64 + b % together() * values(); }
    constexpr int64_t bytes() const { return line(blocks()); }
    constexpr int zero_bits() const { return zero == 32 ? 5 : zero == 16 ? 4 : zero == 8 ? 3 : 2; }
    constexpr bool wide() const { return base == 8 || (table && !zero); }  // needs activations in 16 bits

    // Inputs whose products fit into 16 bits: pairs of adjacent inputs are added up in one lane. |activation| <= 127.
    constexpr int flush() const {
        int top = (1 << (base + extra)) - 1 - zero;
        return (top > zero ? top : zero) * 127 * 16 <= 32767 && sub == 32 ? 32 : 16;
    }
};

constexpr Block block_of(int32_t format) {
    switch (format) {
        case Q8_0: return {8, 0, 0, 32, false, false};
        case Q4_0: return {4, 0, 8, 32, false, false};
        case Q4_1: return {4, 0, 0, 32, false, true};
        case Q5_0: return {4, 1, 16, 32, false, false};
        case Q5_1: return {4, 1, 0, 32, false, true};
        case Q2_K: return {2, 0, 0, 16, true, true};
        case Q3_K: return {2, 1, 4, 16, true, false};
        case Q4_K: return {4, 0, 0, 32, true, true};
        case Q5_K: return {4, 1, 0, 32, true, true};
        case Q6_K: return {6, 0, 32, 16, true, false};
        case IQ4_NL: return {4, 0, 0, 32, false, false, NONLINEAR};
        case IQ4_XS: return {4, 0, 0, 32, true, false, NONLINEAR};
        case MXFP4: return {4, 0, 16, 32, false, false, FLOATS4, true};
    }
    return {};
}

constexpr bool quantised(int32_t format) { return format >= Q8_0; }

// Activations of one row and one block, rounded to integers. A buffer holds [block][row].
struct Row8 {
    int8_t q[32];
    // Minus the sums of q. pairs: over inputs 0, 1 of each quad, then over 2, 3: of the first four quads, of the last four, of all.
    int16_t pairs[6];
    int32_t sums[3];   // of the first 16, the last 16, all
    float scale, sum;  // sum: scale times the sum of q
};
struct Row16 {
    int16_t q[32];  // as `place16` of the instruction set keeps them
    float scale;
    float unused[3];
};
static_assert(sizeof(Row8) == ROW8 && sizeof(Row16) == ROW16, "a block of activations");

void unpack_quantised(const Packed* w, int64_t column, float* out, float factor);

}  // namespace outrider
