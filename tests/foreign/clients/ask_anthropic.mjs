// Anthropic's own client for JavaScript: messages, a stream, a tool and its result, counted tokens, models, errors.
// node ask_anthropic.mjs URL MODEL FOLDER: `npm install @anthropic-ai/sdk` ran in FOLDER.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { FOLDER, HELLO, MODEL, OPTIONS, TOOL, URL, said } from "./ask_common.mjs";

const { Anthropic, BadRequestError, NotFoundError } = createRequire(`${FOLDER}/`)("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: URL, apiKey: "x", maxRetries: 0 });
const expected = await said();
const asked = { model: MODEL, messages: HELLO, ...OPTIONS };
const made = await client.messages.create(asked);
assert.deepEqual(made.content, [{ type: "text", text: expected }]);
const stream = client.messages.stream(asked);
const whole = await stream.finalMessage();
assert.equal(await stream.finalText(), expected);
assert.deepEqual([whole.stop_reason, whole.usage.output_tokens], [made.stop_reason, made.usage.output_tokens]);
const { name, description, parameters } = TOOL.function;
const tools = [{ name, description, input_schema: parameters }];
const long = { model: MODEL, messages: HELLO, max_tokens: 100, seed: 1, tools, tool_choice: { type: "tool", name } };
const called = await client.messages.create(long);
assert.equal(called.stop_reason, "tool_use");
assert.deepEqual((await client.messages.stream(long).finalMessage()).content[0].input, called.content[0].input);
const result = { type: "tool_result", tool_use_id: called.content[0].id, content: "blue" };
const turns = [...HELLO, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
assert.ok((await client.messages.create({ model: MODEL, messages: turns, tools, max_tokens: 8 })).content.length);
const counted = await client.messages.countTokens({ model: MODEL, messages: HELLO });
assert.equal(counted.input_tokens, made.usage.input_tokens + made.usage.cache_read_input_tokens);
const ids = [];
for await (const model of client.models.list()) ids.push(model.id);
assert.deepEqual(ids, [MODEL]);
await assert.rejects(client.messages.create({ ...asked, model: "other" }), NotFoundError);
await assert.rejects(client.messages.create({ ...asked, max_tokens: 0 }), BadRequestError);
console.log("messages, streams, a tool and its result, counted tokens, models, errors: the texts are those of raw requests");
