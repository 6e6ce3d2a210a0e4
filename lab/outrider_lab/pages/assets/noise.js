// Randomness as a value, as in outrider/core/noise.py: a number is a function of (seed, stream, step, position, index).
// Philox4x32-10 (Salmon et al. 2011). The counter is (index / 4, position, stream, step), the key is the seed.

export const TOKEN = 0; // the target's own choice of token
export const DRAFT = 1;
export const ACCEPT = 2;
export const RESIDUAL = 3;

const TOP = 1 - 2 ** -24; // the largest uniform number: log1p(-u) stays finite

/** The two halves [high, low] of the 64-bit product of two 32-bit words. */
function product(a, b) {
  const low = a * (b & 0xffff);
  const high = a * (b >>> 16) + Math.floor(low / 0x10000); // below 2**49
  return [Math.floor(high / 0x10000), ((high % 0x10000) * 0x10000 + (low % 0x10000)) >>> 0];
}

/** Four 32-bit words for four words of counter and two of key. */
export function philox(counter, key) {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round += 1) {
    const [high0, low0] = product(0xd2511f53, c0);
    const [high1, low1] = product(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

let last = { seed: null, key: null }; // large numbers are slow, and a page asks for one seed many times

/** A number in (0, 1). seed: an integer as text, because a number of JavaScript holds 53 bits only. */
export function uniform(seed, stream, step, position, index) {
  if (seed !== last.seed) {
    const bits = BigInt.asUintN(64, BigInt(seed));
    last = { seed, key: [Number(bits & 0xffffffffn), Number(bits >> 32n)] };
  }
  const counter = [index >>> 2, position >>> 0, stream, stream === TOKEN ? 0 : step >>> 0];
  const word = philox(counter, last.key)[index & 3];
  return Math.min(Math.fround((word + 0.5) * 2 ** -32), TOP);
}

/** Standard Gumbel noise: the token with the largest log p + noise is a draw from p. */
export function gumbel(seed, stream, step, position, index) {
  return -Math.log(-Math.log1p(-uniform(seed, stream, step, position, index)));
}
