// Sine and cosine in double, with the same bits on every processor. A C library's differ with and without FMA, and from one
// library to the next. Only + - * are used, each of them rounded once.
#pragma once
#include <cstdint>

namespace outrider {

// Within one unit in the last place for |x| < 2^23. Polynomials of fdlibm (k_sin.c, k_cos.c) on what is left of x after multiples
// of pi / 2 (Cody and Waite 1980): the first three parts of pi / 2 have 30 bits, so their multiples are exact.
inline void sine_cosine(double x, double& sine, double& cosine) {
    constexpr double A = 0x1.921fb54p+0, B = 0x1.10b46118p-30, C = 0x1.313198ap-61, D = 0x1.701b839a25205p-92;
    double high = x * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = high - 0x1.8p52;  // the nearest integer to x / (pi / 2)
    double low = 0;
    auto take = [&](double part) {  // high + low -= part
        double sum = high - part, back = sum - high;
        low += (high - (sum - back)) - (part + back), high = sum;
    };
    high = x;
    take(n * A), take(n * B), take(n * C);
    low -= n * D;
    double y = high + low, rest = (high - y) + low, z = y * y, v = z * y, half = 0.5 * z, w = 1 - half;
    double p = 8.33333333332248946124e-03 +
               z * (-1.98412698298579493134e-04 +
                    z * (2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)));
    double r = z * (4.16666666666666019037e-02 +
                    z * (-1.38888888888741095749e-03 +
                         z * (2.48015872894767294178e-05 +
                              z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
    double s = y - ((z * (0.5 * rest - v * p) - rest) - v * -1.66666666666666324348e-01);
    double c = w + (((1 - w) - half) + (z * r - y * rest));
    int64_t quadrant = static_cast<int64_t>(n) & 3;
    sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
    if (quadrant & 2) sine = -sine;
    if (quadrant == 1 || quadrant == 2) cosine = -cosine;
}

}  // namespace outrider
