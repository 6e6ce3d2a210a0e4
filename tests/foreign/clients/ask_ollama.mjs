// Ollama's own client for JavaScript: a chat, a stream, a prompt, a schema, a tool, the lists, errors.
// node ask_ollama.mjs URL MODEL FOLDER: `npm install ollama` ran in FOLDER.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { FOLDER, HELLO, MODEL, OPTIONS, TOOL, URL, said } from "./ask_common.mjs";

const { Ollama } = createRequire(`${FOLDER}/`)("ollama");
const client = new Ollama({ host: URL });
const options = { temperature: OPTIONS.temperature, top_k: 0, top_p: 1, seed: OPTIONS.seed, num_predict: OPTIONS.max_tokens };
const expected = await said();
const asked = { model: MODEL, messages: HELLO, options };
const made = await client.chat({ ...asked, keep_alive: "5m" });
assert.equal(made.message.content, expected);
assert.ok(made.eval_duration > 0 && made.eval_duration <= made.total_duration);
let text = "";
for await (const part of await client.chat({ ...asked, stream: true })) text += part.message.content;
assert.equal(text, expected);
assert.equal((await client.generate({ model: MODEL, prompt: HELLO[0].content, options })).response, expected);
const place = await client.chat({ model: MODEL, messages: HELLO, format: { enum: ["sky", "sea"] } });
assert.ok(["sky", "sea"].includes(JSON.parse(place.message.content)));
assert.ok((await client.chat({ ...asked, tools: [TOOL], options: { ...options, num_predict: 4 } })).done);
const stopping = await client.chat({ ...asked, stream: true, options: { ...options, num_predict: 400 } });
setTimeout(() => client.abort(), 50);
await assert.rejects(async () => {
  for await (const _ of stopping);
}, { name: "AbortError" });
for (const list of [client.list(), client.ps()]) assert.deepEqual((await list).models.map((m) => m.model), [MODEL]);
assert.ok((await client.show({ model: MODEL })).capabilities.includes("completion"));
assert.ok((await client.version()).version);
await assert.rejects(client.embed({ model: MODEL, input: "x" }), { status_code: 400 });
await assert.rejects(client.chat({ ...asked, model: "other" }), { status_code: 404 });
console.log("a chat, streams, a prompt, a schema, tools, lists, errors: the texts are those of raw requests");
