// Markdown as elements. `marked` finds the parts. Each text goes in as a text node, so nothing that a model writes is markup.

import { el, visible } from "./dom.js";
import { lexer } from "./marked.js";

const LINK = /^(https?:|mailto:)/i;
const SIGNS = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };

/** The nodes of a text in Markdown. copied: called with the text of a block of code. */
export function markdown(text, copied) {
  return blocks(lexer(text), copied);
}

function blocks(tokens, copied) {
  return tokens.map((token) => block(token, copied));
}

function block(token, copied) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "hr":
      return el("hr");
    case "heading":
      if (!token.text.trim()) return el("p", {}, visible(token.raw));
      return el(`h${Math.min(token.depth + 2, 6)}`, {}, inline(token.tokens)); // the page has h1 and h2 of its own
    case "code":
      return el(
        "div",
        { class: "code" },
        el("div", { class: "code-head" }, el("span", {}, visible(token.lang || "code")), el("button", { type: "button", onclick: (event) => copied(token.text, event.target) }, "Copy code")),
        el("pre", { tabindex: 0 }, el("code", {}, visible(token.text))),
      );
    case "blockquote":
      return el("blockquote", {}, blocks(token.tokens, copied));
    case "list":
      return el(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null }, token.items.map((item) => el("li", {}, item.task ? (item.checked ? "☑ " : "☐ ") : null, blocks(item.tokens, copied))));
    case "table":
      return el(
        "div",
        { class: "scroll", role: "region", "aria-label": "Table", tabindex: 0 },
        el("table", {}, el("thead", {}, row(token.header, "th")), el("tbody", {}, token.rows.map((cells) => row(cells, "td")))),
      );
    case "paragraph":
      return el("p", {}, inline(token.tokens));
    case "text":
      return el("span", {}, token.tokens ? inline(token.tokens) : visible(token.text));
    default: // html, and what a later version may find
      return el("p", {}, visible(token.raw));
  }
}

function row(cells, name) {
  return el("tr", {}, cells.map((cell) => el(name, { scope: name === "th" ? "col" : null }, inline(cell.tokens))));
}

function inline(tokens = []) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return el(token.type, {}, inline(token.tokens));
      case "codespan":
        return el("code", {}, visible(token.text));
      case "br":
        return el("br");
      case "image": // the page loads nothing from elsewhere
      case "link":
        if (!LINK.test(token.href)) return visible(token.raw);
        return el("a", { href: token.href, target: "_blank", rel: "noopener noreferrer" }, token.type === "image" ? visible(token.text || token.href) : inline(token.tokens));
      case "escape":
        return visible(token.text);
      case "text":
        return token.tokens ? inline(token.tokens) : visible(token.text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => SIGNS[name]));
      case "checkbox":
        return null;
      default:
        return visible(token.raw);
    }
  }).flat();
}
