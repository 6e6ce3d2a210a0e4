// The page at /: a chat with the model of this server. Texts go in as text nodes, never as markup. The key stays in memory.

import { byId, count, el, percent, short, visible } from "./dom.js";

const told = JSON.parse(byId("data").textContent);
const SAYS = { user: "You", assistant: "Model", prompt: "Your text", completion: "Continued" };
let [model, key, texts, running] = [null, "", [], null];

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

/** Throws an Error with the server's own words for an answer that is none. */
async function checked(answer) {
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  throw new Error(found?.error?.message ?? `the server answers ${answer.status}`);
}

/** The events of a stream, as they come. */
async function* events(body) {
  const [reader, decoder] = [body.getReader(), new TextDecoder()];
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

async function meet() {
  byId("problem").textContent = "";
  try {
    const answer = await checked(await fetch("v1/models", { headers: headers() }));
    model = (await answer.json()).data[0];
    byId("model").textContent = visible(model.id);
    byId("about").textContent = `outrider serves this model with ${model.speculative.method === "none" ? "plain decoding" : `speculative decoding (${visible(model.speculative.method)})`}. Guarantee: ${model.guarantee}. A text has up to ${count(model.max_model_len, "token")}.`;
  } catch (error) {
    model = null;
    byId("problem").textContent = visible(error.message);
  }
  byId("key-form").hidden = !told.key || model !== null;
  byId("chat").hidden = model === null;
}

/** A text in the log. Returns the node that holds it. */
function shown(role, text) {
  const node = el("div", { class: "text" }, visible(text));
  byId("log").append(el("div", { class: role === "user" || role === "prompt" ? "user" : "model" }, el("div", { class: "who" }, SAYS[role]), node));
  byId("log").scrollTop = byId("log").scrollHeight;
  return node;
}

function asked() {
  const common = { model: model.id, stream: true, stream_options: { include_usage: true }, max_tokens: Number(byId("most").value), temperature: Number(byId("temperature").value) };
  return told.chat
    ? ["v1/chat/completions", { ...common, messages: texts.map(({ role, content }) => ({ role, content })) }]
    : ["v1/completions", { ...common, prompt: texts.map((one) => one.content).join("") }];
}

function tell(event) {
  const spec = event.metrics?.speculative_decoding;
  const speed = event.metrics?.tokens_per_second;
  byId("figures").textContent = `${count(event.usage.completion_tokens, "token")}${speed ? `, ${short(speed)} a second` : ""}${spec?.num_draft_tokens ? `; ${percent(spec.num_accepted_draft_tokens / spec.num_draft_tokens)} of ${count(spec.num_draft_tokens, "draft token")} accepted` : ""}.`;
}

async function send() {
  const input = byId("input").value;
  texts.push({ role: told.chat ? "user" : "prompt", content: input });
  shown(texts.at(-1).role, input);
  byId("input").value = "";
  byId("problem").textContent = "";
  const answer = { role: told.chat ? "assistant" : "completion", content: "" };
  const node = shown(answer.role, "");
  running = new AbortController();
  busy(true);
  try {
    const [path, body] = asked();
    const response = await checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal }));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tell(event);
      answer.content += event.choices[0]?.delta?.content ?? event.choices[0]?.text ?? "";
      node.textContent = visible(answer.content);
      byId("log").scrollTop = byId("log").scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") byId("figures").textContent = "Stopped.";
    else byId("problem").textContent = visible(error.message);
  }
  running = null;
  busy(false);
  if (answer.content) texts.push(answer);
  else {
    texts.pop(); // it was not answered, so the next one does not follow it
    byId("input").value ||= input;
    node.parentNode.previousSibling.remove();
    node.parentNode.remove();
  }
  byId("input").focus();
}

function busy(now) {
  byId("send").disabled = now;
  byId("clear").disabled = now;
  byId("stop").disabled = !now;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit(byId("send"));
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  texts = [];
  byId("log").replaceChildren();
  byId("figures").textContent = "";
  byId("input").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  meet();
});
byId("chat-title").textContent = told.chat ? "Chat" : "Continue a text";
byId("chat-note").textContent = told.chat ? "Enter sends, Shift and Enter begin a line. The page forgets the chat when you leave." : "This model has no chat template: it continues what you write. The next piece follows all texts above.";
byId("input-label").textContent = told.chat ? "Your message" : "Your text";
byId("base").textContent = new URL("v1", location.href).href;
meet();
