// The page at /: a chat with the models of this server. Texts go in as text nodes, never as markup. The key stays in memory.

import { begin, conversations, forget, keep, title } from "./conversations.js";
import { byId, bytes, count, el, percent, short, visible } from "./dom.js";
import { markdown } from "./markdown.js";

const told = JSON.parse(byId("data").textContent);
const SAYS = { user: "You", assistant: "Model", prompt: "Your text", completion: "Continued" };
const SAMPLING = ["top_p", "top_k", "min_p", "seed"]; // empty leaves them to the server
let [models, key, talk, running] = [[], "", begin(), null];

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });
const model = () => models.find((one) => one.id === byId("choice").value) ?? models[0];

/** Throws an Error with the server's own words for an answer that is none. */
async function checked(answer) {
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  throw new Error(found?.error?.message ?? found?.error ?? `the server answers ${answer.status}`);
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
    models = (await answer.json()).data;
    const kept = byId("choice").value || (models.find((one) => one.state === "loaded") ?? models[0]).id;
    byId("choice").replaceChildren(...models.map((one) => el("option", { value: one.id }, visible(one.id))));
    byId("choice").value = kept;
    byId("pick").hidden = models.length < 2;
    present();
  } catch (error) {
    models = [];
    byId("problem").textContent = visible(error.message);
  }
  byId("key-form").hidden = !told.key || models.length > 0;
  byId("chat").hidden = models.length === 0;
}

/** Have the chosen model loaded: what it can do is known then. */
async function choose() {
  if (model().state !== "loaded") {
    byId("about").textContent = `${visible(model().id)} is loaded ...`;
    await checked(await fetch("api/generate", { method: "POST", headers: headers(), body: JSON.stringify({ model: model().id, stream: false }), signal: running?.signal }));
    await meet();
  } else present();
}

function present() {
  const one = model();
  byId("model").textContent = visible(one.id);
  const method = one.speculative?.method;
  byId("about").textContent = method
    ? `outrider serves this model with ${method === "none" ? "plain decoding" : `speculative decoding (${visible(method)})`}. Guarantee: ${one.guarantee}. A text has up to ${count(one.max_model_len, "token")}.`
    : `outrider loads this model when you ask it${one.size ? `: ${bytes(one.size)}` : ""}.`;
  const chats = one.chat !== false;
  byId("chat-title").textContent = chats ? "Chat" : "Continue a text";
  byId("chat-note").textContent = chats ? "Enter sends. Shift and Enter begin a line. Escape stops." : "This model has no chat template: it continues what you write. The next piece follows all texts above.";
  byId("input-label").textContent = chats ? "Your message" : "Your text";
  byId("system").hidden = byId("system-label").hidden = !chats;
}

/** The path and the body of a request for the text after these messages. */
function asked(messages, instructions) {
  const common = { model: model().id, stream: true, stream_options: { include_usage: true }, return_pieces: true, max_tokens: Number(byId("most").value), temperature: Number(byId("temperature").value) };
  for (const name of SAMPLING) if (byId(name).value !== "") common[name] = Number(byId(name).value);
  const system = instructions.trim() ? [{ role: "system", content: instructions }] : [];
  return model().chat
    ? ["v1/chat/completions", { ...common, messages: [...system, ...messages.map(({ role, content }) => ({ role, content }))] }]
    : ["v1/completions", { ...common, prompt: messages.map((one) => one.content).join("") }];
}

/** Ask, and fill a message as its text comes: content, pieces, and at the end seed, finish and figures. */
async function write([path, body], message, changed) {
  const response = await checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal }));
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    message.content += text;
    if (text) message.pieces.push(...(choice.pieces ?? [[text, false]]));
    if (choice?.finish_reason) Object.assign(message, { finish: choice.finish_reason, seed: choice.seed, note: choice.note });
    if (event.usage) message.figures = figures(event);
    changed();
  }
}

/** What the last event of a text says. speed: tokens a second after the first token. */
function figures({ usage, metrics }) {
  const [spec, gap] = [metrics?.speculative_decoding, metrics?.mean_itl_ms];
  return { tokens: usage.completion_tokens, speed: gap ? 1000 / gap : null, drafted: spec?.num_draft_tokens ?? 0, accepted: spec?.num_accepted_draft_tokens ?? 0, method: spec?.method };
}

/** The line about a text. A text that was cut says so, and how to have more. */
function says({ figures: { tokens, speed, drafted, accepted }, seed, finish, note }) {
  const cut = finish === "length" ? " It was cut there: more tokens are allowed in Settings." : "";
  return `${count(tokens, "token")}${speed ? `, ${short(speed)} a second` : ""}${drafted ? `; ${percent(accepted / drafted)} of ${count(drafted, "draft token")} accepted` : ""}; seed ${seed}.${cut}${note ? ` ${visible(note)}` : ""}`;
}

/** The nodes of a text: its tokens with their colours, or Markdown. */
function body(message) {
  if (byId("colours").checked && message.pieces?.length) return el("div", { class: "tokens" }, message.pieces.map(([text, drafted]) => el("span", { class: drafted ? "accepted" : null }, visible(text))));
  if (message.role !== "assistant") return el("div", { class: "plain" }, visible(message.content));
  return markdown(message.content, copy).filter(Boolean);
}

/** Pixels of a part of the log below what is seen. The log follows a part that grows while its end is near, so a reader may scroll away. */
const below = (part) => part.getBoundingClientRect().bottom - byId("log").getBoundingClientRect().bottom;
const NEAR = 40;

function following(part, grow) {
  const near = below(part) < NEAR;
  grow();
  if (near) byId("log").scrollTop += Math.max(below(part), 0);
}

function fill(node, message) {
  node.replaceChildren(...[body(message)].flat());
}

/** A message in the log. Returns the node that holds its text. */
function shown(message) {
  const node = el("div", { class: "text" });
  fill(node, message);
  const own = message.role === "user" || message.role === "prompt";
  byId("log").append(el("div", { class: own ? "user" : "model" }, el("div", { class: "who" }, SAYS[message.role]), node, buttons(message, own)));
  return node;
}

function buttons(message, own) {
  const button = (name, run) => el("button", { type: "button", onclick: run }, name);
  if (own) return el("div", { class: "small-buttons" }, button("Edit", () => edit(message)));
  return el("div", { class: "small-buttons" }, button("Copy", (event) => copy(message.content, event.target)), button("Retry", () => retry(message)), message.asked && message.finish ? button("Again without speculation, same seed", (event) => again(message, event.target)) : null, message.figures ? el("span", {}, says(message)) : null);
}

async function copy(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refuses";
  }
  setTimeout(() => (button.textContent = name), 1500);
}

/** Draw the conversation and the list of all. at: where the log stands; without it, at its end. */
function draw(at = null) {
  byId("log").replaceChildren();
  talk.messages.forEach(shown);
  byId("log").scrollTop = at ?? byId("log").scrollHeight;
  byId("system").value = talk.system;
  byId("kept").replaceChildren(
    ...conversations().map((one) =>
      el("li", {}, el("button", { type: "button", "aria-current": one.id === talk.id ? "true" : null, onclick: () => open(one) }, visible(title(one))), el("button", { type: "button", "aria-label": `Delete ${visible(title(one))}`, onclick: () => drop(one) }, "✕")),
    ),
  );
  byId("forget").disabled = conversations().length === 0;
}

function open(one) {
  if (running) return;
  talk = one;
  byId("figures").textContent = "";
  draw();
  byId("input").focus();
}

function drop(one) {
  if (running) return;
  forget(one === null ? null : one.id);
  open(one === null || one.id === talk.id ? begin(talk.system) : talk);
}

/** Take a message and all after it away. */
function cut(message) {
  talk.messages.splice(talk.messages.indexOf(message));
}

function edit(message) {
  if (running) return;
  cut(message);
  byId("input").value = message.content;
  draw();
  byId("input").focus();
}

function retry(message) {
  if (running) return;
  cut(message);
  draw();
  answer("");
}

async function send() {
  const input = byId("input").value;
  if (model().state !== "loaded" && !(await busy(choose))) return;
  talk.messages.push({ role: model().chat ? "user" : "prompt", content: input });
  shown(talk.messages.at(-1));
  byId("input").value = "";
  await answer(input);
}

/** Let the model write the next message. input: what goes back into the box if nothing is written. */
async function answer(input) {
  const request = asked(talk.messages, talk.system);
  const message = { role: model().chat ? "assistant" : "completion", content: "", pieces: [], asked: request, system: talk.system };
  const node = shown(message);
  byId("log").scrollTop = byId("log").scrollHeight;
  await busy(() => write(request, message, later(() => following(node.parentNode, () => fill(node, message)))));
  const at = below(node.parentNode) < NEAR ? null : byId("log").scrollTop;
  if (message.content || message.finish) {
    delete message.asked[1].messages; // the conversation has them
    delete message.asked[1].prompt;
    talk.messages.push(message);
    const left = keep(talk);
    if (left) byId("problem").textContent = `The browser has no more room: ${count(left, "old conversation")} left.`;
    if (message.figures) byId("figures").textContent = says(message);
  } else if (input) {
    talk.messages.pop(); // it was not answered, so the next one does not follow it
    byId("input").value ||= input;
  }
  draw(at);
  byId("input").focus();
}

/** Write a text again with its seed and without drafts, beside it, and compare both. */
async function again(message, button) {
  if (running) return;
  const [path, fresh] = asked(talk.messages.slice(0, talk.messages.indexOf(message)), message.system);
  const body = { ...fresh, ...message.asked[1], seed: message.seed, disable_spec_decode: true };
  const plain = { content: "", pieces: [] };
  const [text, verdict] = [el("div", { class: "text plain" }), el("p", { role: "status" }, "The same text, without speculation:")];
  const beside = el("div", {}, verdict, text);
  button.parentNode.after(beside);
  button.disabled = true;
  beside.scrollIntoView({ block: "nearest" });
  await busy(() => write([path, body], plain, later(() => following(beside, () => (text.textContent = visible(plain.content))))));
  text.textContent = visible(plain.content);
  if (!plain.finish) verdict.textContent = "Not finished.";
  else if (plain.content !== message.content) {
    verdict.className = "differs";
    verdict.textContent = model().guarantee === "exact-tokens" ? "The texts differ. This is a bug: please report it." : `The texts differ, as the guarantee ${model().guarantee} allows.`;
  } else {
    const [fast, slow] = [message.figures?.speed, plain.figures?.speed];
    verdict.className = "same";
    verdict.textContent = `The same text.${fast && slow ? ` ${short(fast)} tokens a second with speculation, ${short(slow)} without: ${short(fast / slow)} times as fast.` : ""}`;
    text.remove();
  }
  verdict.scrollIntoView({ block: "nearest" });
}

/** Do work that the Stop button ends, and say what went wrong. Returns whether it went well. */
async function busy(work) {
  byId("problem").textContent = "";
  running = new AbortController();
  mark(true);
  let well = false;
  try {
    await work();
    well = true;
  } catch (error) {
    if (error.name === "AbortError") byId("figures").textContent = "Stopped.";
    else byId("problem").textContent = visible(error.message);
  }
  running = null;
  mark(false);
  return well;
}

function mark(now) {
  byId("send").disabled = now;
  byId("clear").disabled = now;
  byId("stop").disabled = !now;
  byId("log").setAttribute("aria-busy", now);
}

/** At most one call for each frame of the screen. */
function later(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  };
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
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => open(begin(talk.system)));
byId("forget").addEventListener("click", () => drop(null));
byId("system").addEventListener("change", () => (talk.system = byId("system").value));
byId("choice").addEventListener("change", () => (running ? present() : busy(choose)));
byId("colours").addEventListener("change", () => {
  byId("legend").hidden = !byId("colours").checked;
  if (!running) draw();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  meet();
});
byId("base").textContent = new URL("v1", location.href).href;
byId("root").textContent = new URL(".", location.href).href.replace(/\/$/, "");
draw();
meet();
