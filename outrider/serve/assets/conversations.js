// Conversations, kept in this browser and nowhere else. The oldest leave when the browser has no more room.

const NAME = "outrider.conversations";
const MOST = 100;

let kept = null;

/** All conversations, the newest first: {id, system, messages}. */
export function conversations() {
  if (kept === null) {
    try {
      const found = JSON.parse(localStorage.getItem(NAME) ?? "[]");
      kept = Array.isArray(found) ? found.filter((one) => one && Array.isArray(one.messages)) : [];
    } catch {
      kept = [];
    }
  }
  return kept;
}

/** An empty one. It is kept when it has a message. */
export function begin(system = "") {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, system, messages: [] };
}

/** Put a conversation first and write all. Returns how many had to leave. */
export function keep(conversation) {
  const others = conversations().filter((one) => one.id !== conversation.id);
  kept = [...(conversation.messages.length ? [conversation] : []), ...others].slice(0, MOST);
  const before = others.length + 1;
  for (;;) {
    try {
      localStorage.setItem(NAME, JSON.stringify(kept));
      return Math.max(0, before - Math.max(kept.length, 1));
    } catch {
      if (kept.length <= 1) return before - 1; // not even one: it lives until the page is left
      kept.pop();
    }
  }
}

/** Forget one, or all with null. */
export function forget(id) {
  kept = id === null ? [] : conversations().filter((one) => one.id !== id);
  try {
    localStorage.setItem(NAME, JSON.stringify(kept));
  } catch {
    // a browser that keeps nothing has nothing to forget
  }
}

/** The beginning of its first message. */
export function title(conversation) {
  const first = conversation.messages[0]?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47)}…` : line || "New";
}
