// What the scripts for JavaScript's clients share: the reference answer, asked without any client library.
export const URL = process.argv[2] ?? "http://127.0.0.1:8000";
export const MODEL = process.argv[3] ?? "code";
export const FOLDER = process.argv[4] ?? process.cwd();
export const HELLO = [{ role: "user", content: "sort a list" }];
export const OPTIONS = { temperature: 0.8, seed: 3, max_tokens: 24 };
const parameters = {
  type: "object", properties: { at: { enum: ["sky", "sea"] } }, required: ["at"], additionalProperties: false,
};
export const TOOL = { type: "function", function: { name: "look", description: "Look at a place.", parameters } };

export async function raw(path, body) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(URL + path, { method: "POST", headers, body: JSON.stringify({ model: MODEL, ...body }) });
  return response.json();
}

export const said = async () =>
  (await raw("/v1/chat/completions", { messages: HELLO, ...OPTIONS })).choices[0].message.content;
