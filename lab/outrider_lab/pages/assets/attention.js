// What attention and the weights cost in bytes read, for a model {layers, heads, kv_heads, head_dim, kv_bytes, weight_bytes}.

/** Keys and values of one token, in all layers. shared: with grouped-query attention; else each query head has its own. */
export function bytesPerToken(model, shared = true) {
  return model.layers * 2 * (shared ? model.kv_heads : model.heads) * model.head_dim * model.kv_bytes;
}

/** Bytes of keys and values that are read for `nodes` draft rows over `context` cached tokens.
 *
 * one_pass: a fused kernel reads each key once for all rows and all query heads of its group. no_groups: each query head has
 * keys of its own. one_by_one: as many plain steps, each reads the cache anew. */
export function bytesRead(model, context, nodes) {
  const [own, all] = [bytesPerToken(model), bytesPerToken(model, false)];
  const steps = Array.from({ length: nodes }, (_, n) => context + n + 1);
  return {
    one_pass: own * (context + nodes),
    no_groups: all * (context + nodes),
    one_by_one: own * steps.reduce((sum, tokens) => sum + tokens, 0),
  };
}

/** Bytes of weights: one pass reads them once, plain decoding once for each token. */
export function weightsRead(model, nodes) {
  return { one_pass: model.weight_bytes, one_by_one: model.weight_bytes * nodes };
}
