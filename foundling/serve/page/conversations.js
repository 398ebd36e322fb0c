// Conversations, kept in this browser (IndexedDB) and nowhere else: list, search, export, import.
//
// A conversation is {id, title, created, updated, sides, turns}; a turn {prompt, question, replies},
// with a reply for each side. IndexedDB and not localStorage: token probabilities fill its 5 MB fast.

import { sideFrom } from "./settings.js";

const SCHEMA = 1;

const text = (value, otherwise = "") => (typeof value === "string" ? value : otherwise);
const number = (value) => (Number.isFinite(value) ? value : null);

/** A new conversation with these sides: {model, system, temperature, ...}, one or two. */
export function newConversation(sides) {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? fallbackId(), title: "", created: now, updated: now, sides, turns: [] };
}

/** randomUUID is for https and localhost only; a page in a local network has none. */
function fallbackId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
}

export function newReply(model) {
  return {
    model, text: "", tokens: [], usage: null, first: null, seconds: null, ended: null, error: null,
    left: 0, verdict: null,
  };
}

/** What it is called in the list: its own title, or how it begins. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const begin = conversation.turns[0]?.prompt.trim().split("\n")[0] ?? "";
  if (!begin) return "New conversation";
  return begin.length > 60 ? `${begin.slice(0, 59).trimEnd()}…` : begin;
}

/** Does every word occur in it, in whatever order? */
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const all = [
    titleOf(conversation),
    ...conversation.turns.flatMap((turn) => [turn.prompt, ...turn.replies.map((reply) => reply?.text ?? "")]),
  ]
    .join("\n")
    .toLowerCase();
  return words.every((word) => all.includes(word));
}

// What a file brings is taken field by field: nothing in it is trusted.

function tokenFrom(value) {
  if (!Array.isArray(value) || typeof value[0] !== "string") return null;
  const numbers = [value[1], value[3], value[4]];
  if (!numbers.every(Number.isFinite)) return null;
  const others = (Array.isArray(value[2]) ? value[2] : []).filter(
    (other) => typeof other?.[0] === "string" && Number.isFinite(other[1]),
  );
  return [value[0], value[1], others.map((other) => [other[0], other[1]]), value[3], value[4]];
}

function replyFrom(value) {
  if (typeof value !== "object" || value === null) return null;
  const usage = value.usage;
  return {
    ...newReply(text(value.model)),
    text: text(value.text),
    tokens: (Array.isArray(value.tokens) ? value.tokens : []).map(tokenFrom).filter(Boolean),
    usage:
      usage && Number.isFinite(usage.prompt_tokens) && Number.isFinite(usage.completion_tokens)
        ? { prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens }
        : null,
    first: number(value.first),
    seconds: number(value.seconds),
    ended: text(value.ended, null),
    error: text(value.error, null),
    left: number(value.left) ?? 0,
    verdict:
      typeof value.verdict?.correct === "boolean"
        ? { correct: value.verdict.correct, truth: text(value.verdict.truth) }
        : null,
  };
}

function conversationFrom(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.turns) || !Array.isArray(value.sides))
    return null;
  return {
    id: value.id,
    title: text(value.title),
    created: number(value.created) ?? 0,
    updated: number(value.updated) ?? 0,
    sides: (value.sides.length ? value.sides : [{}]).slice(0, 2).map(sideFrom),
    turns: value.turns
      .filter((turn) => typeof turn?.prompt === "string")
      .map((turn) => ({
        prompt: turn.prompt,
        question: turn.question === true,
        replies: (Array.isArray(turn.replies) ? turn.replies : []).slice(0, 2).map(replyFrom),
      })),
  };
}

/** Has `found` everything that was said `here`? */
function continues(found, here) {
  return here.turns.every((turn, n) => {
    const other = found.turns[n];
    const same = (reply, at) => !reply?.text || other.replies[at]?.text === reply.text;
    return other?.prompt === turn.prompt && turn.replies.every(same);
  });
}

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All conversations, in memory and in the database; another tab's changes arrive by `onchange`. */
export class Conversations {
  constructor(database, kept) {
    this.database = database;
    this.all = new Map(kept.map((conversation) => [conversation.id, conversation]));
    this.onchange = () => {};
    this.onfull = () => {};
    this.tabs = "BroadcastChannel" in globalThis ? new BroadcastChannel("foundling") : null;
    this.tabs?.addEventListener("message", ({ data }) => this.reread(data));
  }

  /** Opens what this browser has; without a database it holds until the page is left. */
  static async open() {
    try {
      const opening = indexedDB.open("foundling", SCHEMA);
      opening.onupgradeneeded = () =>
        opening.result.createObjectStore("conversations", { keyPath: "id" });
      const database = await promised(opening);
      const kept = await promised(
        database.transaction("conversations").objectStore("conversations").getAll(),
      );
      return new Conversations(database, kept);
    } catch {
      return new Conversations(null, []);
    }
  }

  get lasting() {
    return this.database !== null;
  }

  /** Newest first. */
  list(query = "") {
    return [...this.all.values()]
      .filter((conversation) => matches(conversation, query))
      .sort((one, other) => other.updated - one.updated);
  }

  async write(change) {
    if (!this.database) return;
    try {
      const transaction = this.database.transaction("conversations", "readwrite");
      await promised(change(transaction.objectStore("conversations")));
    } catch {
      this.onfull();
    }
  }

  async save(conversation) {
    this.all.set(conversation.id, conversation);
    await this.write((store) => store.put(conversation));
    this.tabs?.postMessage(conversation.id);
  }

  async remove(id) {
    this.all.delete(id);
    await this.write((store) => store.delete(id));
    this.tabs?.postMessage(id);
  }

  async reread(id) {
    if (!this.database) return;
    const store = this.database.transaction("conversations").objectStore("conversations");
    const kept = await promised(store.get(id));
    if (kept) this.all.set(id, kept);
    else this.all.delete(id);
    this.onchange(id);
  }

  exported() {
    return JSON.stringify({ foundling_conversations: SCHEMA, conversations: this.list() }, null, 1);
  }

  /**
   * Adds what a file has. Where a conversation is here already, the newer one stays; where the file's
   * is the newer and lacks something that was said here, both do. Gives how many were new.
   */
  async import(file) {
    let value;
    try {
      value = JSON.parse(await file.text());
    } catch {
      throw new Error(`${file.name} is no JSON: choose a file that this page has exported.`);
    }
    if (value?.foundling_conversations !== SCHEMA || !Array.isArray(value.conversations))
      throw new Error(`${file.name} holds no conversations: choose a file that this page has exported.`);
    let added = 0;
    for (const found of value.conversations.map(conversationFrom).filter(Boolean)) {
      const here = this.all.get(found.id);
      if (here && here.updated >= found.updated) continue;
      if (here && !continues(found, here)) found.id += `-${found.updated}`;
      else if (here?.title) found.title = here.title;
      if (found.id !== here?.id && this.all.has(found.id)) continue;
      await this.save(found);
      added += 1;
    }
    return added;
  }
}
