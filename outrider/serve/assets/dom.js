// Elements, numbers and texts for the pages. Every text of a run goes in as a text node, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) made.style.setProperty(key, item);
    else made.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** An HTML element. Attributes that begin with `on` are listeners. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** A number with three significant digits. */
export function short(x) {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1000) return Math.round(x).toLocaleString("en-US");
  return x.toFixed(Math.max(0, Math.min(2 - Math.floor(Math.log10(size)), 4)));
}

export function percent(x) {
  return `${(100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0)} %`;
}

export function bytes(x) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (x >= size) return `${short(x / size)} ${unit}`;
  return `${short(x)} B`;
}

export function seconds(x) {
  if (x >= 1) return `${short(x)} s`;
  return x >= 0.001 ? `${short(1000 * x)} ms` : `${short(1e6 * x)} µs`;
}

export function count(n, noun) {
  return `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;
}

// Characters that a browser interprets or drops: control characters, and those that change the direction of a text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufdd0-\ufdef\ufeff\ufffe\uffff]/g;

/** A text in which every character can be seen: hidden ones become codes. Line breaks stay. */
export function visible(text) {
  return text.replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A token on one line: line breaks and tabs as signs, spaces as dots at either end. */
export function label(text) {
  if (text === "") return "(empty)";
  const line = visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return line.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

/** The same, cut to a number of characters. */
export function clipped(text, most) {
  const whole = [...label(text)];
  return whole.length > most ? `${whole.slice(0, most - 1).join("")}…` : whole.join("");
}

/** The elements with an id in a part of the page, by their ids. */
export function parts(root) {
  return Object.fromEntries([...root.querySelectorAll("[id]")].map((node) => [node.id.replace(/^\w+-/, ""), node]));
}

/** Call draw(width) now and whenever the width of an element changes. Returns a function that draws again. */
export function sized(node, draw) {
  let width = 0;
  const again = () => {
    if (width > 0) draw(width);
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now === width) return;
    width = now;
    again();
  }).observe(node);
  width = Math.floor(node.getBoundingClientRect().width);
  again();
  return again;
}

/** A labelled range input whose value stands beside it. show: value -> text. */
export function slider({ id, name, min, max, step, value, show, change }) {
  const output = el("output", { for: id }, show(value));
  const input = el("input", { id, type: "range", min, max, step, value, "aria-valuetext": show(value) });
  const set = (now) => {
    output.textContent = show(now);
    input.setAttribute("aria-valuetext", show(now));
  };
  input.addEventListener("input", () => {
    set(Number(input.value));
    change(Number(input.value));
  });
  return {
    node: el("div", { class: "field" }, el("label", { for: id }, name), output, input),
    input,
    set(now) {
      input.value = now;
      set(now);
    },
  };
}

/** A labelled choice. options: [[value, text], ...]. */
export function choice({ id, name, options, value, change }) {
  const select = el("select", { id }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  select.addEventListener("change", () => change(select.value));
  return { node: el("div", { class: "field" }, el("label", { for: id }, name), select), select };
}

/** A row of buttons of which one is chosen. Arrow keys move between them. */
export function radios({ name, options, value, change }) {
  const buttons = options.map(([key, text]) =>
    el("button", { type: "button", role: "radio", "data-value": key, onclick: () => choose(key, true) }, text),
  );
  const choose = (key, tell) => {
    buttons.forEach((button) => {
      const on = button.dataset.value === key;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
    });
    if (tell) change(key);
  };
  const group = el("div", { class: "controls", role: "radiogroup", "aria-label": name }, buttons);
  group.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = buttons.indexOf(document.activeElement);
    if (!move || at < 0) return;
    event.preventDefault();
    const next = buttons[(at + move + buttons.length) % buttons.length];
    next.focus();
    choose(next.dataset.value, true);
  });
  choose(value, false);
  return group;
}
