// The openai package for JavaScript: text, chat, streams, a tool, a schema, responses, errors.
// node ask_openai.mjs URL MODEL FOLDER: `npm install openai` ran in FOLDER.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { FOLDER, HELLO, MODEL, OPTIONS, TOOL, URL, raw, said } from "./ask_common.mjs";

const { NotFoundError, OpenAI } = createRequire(`${FOLDER}/`)("openai");
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "x", maxRetries: 0 });
const expected = await said();
const prompted = (await raw("/v1/completions", { prompt: "def f(x):", ...OPTIONS })).choices[0].text;
const ids = [];
for await (const model of await client.models.list()) ids.push(model.id);
assert.ok(ids.includes(MODEL));
const text = { model: MODEL, prompt: "def f(x):", ...OPTIONS };
assert.equal((await client.completions.create(text)).choices[0].text, prompted);
const chat = { model: MODEL, messages: HELLO, ...OPTIONS };
assert.equal((await client.chat.completions.create(chat)).choices[0].message.content, expected);
const stream = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
assert.equal((await stream.finalChatCompletion()).choices[0].message.content, expected);
assert.ok((await stream.totalUsage()).completion_tokens > 0);
const long = { model: MODEL, messages: HELLO, max_tokens: 100, seed: 1 };
const choice = { type: "function", function: { name: "look" } };
const called = await client.chat.completions.create({ ...long, tools: [TOOL], tool_choice: choice });
assert.ok(["sky", "sea"].includes(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).at));
const place = { type: "json_schema", json_schema: { name: "place", strict: true, schema: TOOL.function.parameters } };
const parsed = await client.chat.completions.parse({ ...long, response_format: place });
assert.ok(["sky", "sea"].includes(JSON.parse(parsed.choices[0].message.content).at));
const { temperature, seed, max_tokens } = OPTIONS;
const response = { model: MODEL, input: HELLO[0].content, temperature, seed, max_output_tokens: max_tokens };
assert.equal((await client.responses.create(response)).output_text, expected);
const events = client.responses.stream(response);
assert.equal((await events.finalResponse()).output_text, expected);
await assert.rejects(client.chat.completions.create({ ...chat, model: "other" }), NotFoundError);
console.log("text, chat, streams, a tool, a schema, responses, an error: the texts are those of raw requests");
