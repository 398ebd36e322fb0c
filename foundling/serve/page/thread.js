// The conversation as it stands: turns with their replies, what can be done with each, what they cost.

import { copy, el, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { legend, makeReachable, tokenLeaf } from "./probabilities.js";

const whole = new Intl.NumberFormat("en");

/** In less time than this, the network hands over several tokens as one. */
const SHORTEST = 0.1;

/** Tokens a second: from the first to the last, or from the question on where those come at once. */
export function speed(reply) {
  const tokens = reply.usage?.completion_tokens ?? reply.tokens.length;
  if (tokens < 2 || !reply.seconds) return null;
  const seconds = reply.seconds - (reply.first ?? 0);
  return seconds > SHORTEST ? (tokens - 1) / seconds : tokens / reply.seconds;
}

/** What a reply cost and how it ended, as pieces of one line. */
function factsOf(reply, running) {
  const tokens = reply.usage?.completion_tokens ?? reply.tokens.length;
  const rate = speed(reply);
  const ends = { length: "cut at the longest length", stopped: "stopped by you", error: "", stop: "" };
  let end = "";
  if (!running) {
    end = reply.ended === null ? "cut off when the page was left" : (ends[reply.ended] ?? "");
    if (!end && !reply.text && !reply.error) end = "it said nothing";
  }
  const first = running || reply.first === null ? "" : `first token after ${reply.first.toFixed(2)} s`;
  const facts = {
    tokens: tokens ? `${whole.format(tokens)} token${tokens === 1 ? "" : "s"}` : "",
    rate: rate ? `${rate < 10 ? rate.toFixed(1) : whole.format(Math.round(rate))} tokens/s` : "",
    first,
    end,
  };
  return Object.entries(facts)
    .filter(([, fact]) => fact)
    .map(([name, fact], n) => el("span", { class: name }, n ? ` \u00b7 ${fact}` : fact));
}

/** What the model was not given of the conversation, said before its reply. */
function leftLine({ left }, context) {
  const read = context ? `: the model reads ${whole.format(context)} tokens` : "";
  return el("p", { class: "left-out" }, `${left} earlier messages left out${read}.`);
}

function verdictLine({ correct, truth }) {
  return el(
    "p",
    { class: `verdict ${correct ? "right" : "wrong"}` },
    icon(correct ? "right" : "wrong"),
    el("b", {}, correct ? "Right" : "Wrong"),
    truth && !correct ? el("span", {}, `The truth: ${truth}`) : null,
  );
}

/** One reply on the page; `update` shows what has come since. */
class ReplyView {
  constructor(reply, { prompt, name, model, shown, actions, offered }) {
    const canChat = model?.can_chat ?? true;
    this.reply = reply;
    this.canChat = canChat;
    this.context = model?.context;
    this.shown = shown;
    this.text = el("div", { class: canChat ? "text" : "text written" });
    this.given = canChat ? null : el("span", { class: "given" }, prompt);
    this.more = canChat ? null : el("span");
    if (!canChat) this.text.append(this.given, this.more);
    this.before = el("div");
    this.verdict = el("div", { class: "verdict-place" });
    this.error = el("div", { class: "error-place" });
    this.facts = el("span", { class: "facts" });
    this.copy = iconButton("Copy the reply", "copy", () => copy(reply.text, this.copy));
    this.again = iconButton("Again", "again", actions.again);
    this.probabilities = iconButton("Show probabilities", "probability", () => this.showProbabilities());
    this.legend = legend();
    this.buttons = el(
      "span",
      { class: "buttons" },
      this.copy,
      this.probabilities,
      this.again,
      canChat ? null : iconButton("Go on", "onward", actions.goOn),
      canChat ? null : iconButton("Edit the text", "edit", actions.edit),
    );
    this.foot = el("div", { class: "foot" }, this.facts, this.buttons);
    this.root = el(
      "section",
      { class: "reply", "aria-label": `${name} replies` },
      el("h2", { class: "speaker" }, name),
      el("div", { class: "body" }, this.before, this.text, this.legend, this.verdict, this.error, this.foot),
    );
    this.offered = offered;
    this.showProbabilities(shown.has(reply));
  }

  /** Tints each token by its probability. */
  showProbabilities(on = !this.shown.has(this.reply)) {
    if (on) this.shown.add(this.reply);
    else this.shown.delete(this.reply);
    this.root.classList.toggle("probabilities", on);
    this.legend.hidden = !on;
    this.probabilities.setAttribute("aria-pressed", String(on));
  }

  update(running) {
    const { reply } = this;
    const leaf = tokenLeaf(reply);
    if (this.canChat) render(this.text, reply.text, leaf);
    else this.more.replaceChildren(...leaf(reply.text, 0));
    makeReachable(this.text);
    this.root.classList.toggle("running", running);
    this.root.setAttribute("aria-busy", String(running));
    this.facts.replaceChildren(...factsOf(reply, running));
    this.buttons.hidden = running;
    this.copy.hidden = this.probabilities.hidden = !reply.text;
    // A reply that was refused has a button of its own for that.
    this.again.hidden = Boolean(reply.error);
    this.foot.hidden = this.canChat && this.again.hidden && !reply.text;
    this.before.replaceChildren(...(reply.left && !this.foot.hidden ? [leftLine(reply, this.context)] : []));
    this.verdict.replaceChildren(...(reply.verdict ? [verdictLine(reply.verdict)] : []));
    this.error.replaceChildren(...(reply.error ? [this.errorBox()] : []));
  }

  errorBox() {
    return el(
      "div",
      { class: "error" },
      el("p", {}, this.reply.error),
      ...this.offered.map(([name, run]) =>
        el("button", { type: "button", class: "plain", onclick: run }, name),
      ),
    );
  }
}

/** The pieces of a turn that are the same with one side and with two. */
const blocksOf = (turn) => [
  ...turn.querySelectorAll(".said .body, .reply:first-child .text > *, .reply:first-child .foot"),
];

/** The region that shows a conversation. */
export class Thread {
  constructor(region, scroller, app) {
    this.region = region;
    this.scroller = scroller;
    this.app = app;
    this.views = new Map();
    this.elements = new WeakMap();
    this.shown = null;
    /** Of which replies the probabilities are shown. */
    this.withProbabilities = new WeakSet();
    /** The boxes in which messages are being changed, by turn, and what these said before. */
    this.edits = new Map();
  }

  /**
   * Draws it anew; called when turns or sides have changed, not while a reply streams. Of the same
   * conversation, the reader keeps `place` and the boxes in which something is being written.
   */
  show(conversation, place) {
    const same = this.shown === conversation.id;
    this.shown = conversation.id;
    for (const [index, { prompt }] of this.edits)
      if (!same || conversation.turns[index]?.prompt !== prompt) this.edits.delete(index);
    this.views.clear();
    this.region.classList.toggle("comparing", conversation.sides.length > 1);
    const turns = conversation.turns.map((turn, index) => this.turn(conversation, turn, index));
    this.region.replaceChildren(...turns);
    for (const view of this.views.values()) view.update(this.app.isRunning(view.reply));
    for (const { box } of this.edits.values()) grow(box);
    if (same && place) this.returnTo(place);
    else this.toEnd();
  }

  turn(conversation, turn, index) {
    const { app } = this;
    const replies = turn.replies.map((reply, side) => {
      if (!reply) return null;
      const model = app.modelOf(reply.model);
      const view = new ReplyView(reply, {
        prompt: turn.prompt,
        name: turn.replies.length > 1 ? `${"AB"[side]} ${reply.model}` : reply.model,
        model,
        shown: this.withProbabilities,
        actions: {
          again: () => app.again(index, side),
          goOn: () => app.goOn(index, side),
          edit: () => this.edit(index),
        },
        offered: [
          ["Try again", () => app.again(index, side)],
          ...(index > 0 ? [["Ask in a new conversation", () => app.askElsewhere(index)]] : []),
        ],
      });
      this.views.set(reply, view);
      this.elements.set(view.root, reply);
      return view.root;
    });
    const chats = conversation.sides.some((side) => app.modelOf(side.model)?.can_chat ?? true);
    return el(
      "article",
      { class: "turn", "aria-label": `Turn ${index + 1}`, dataset: { turn: index } },
      chats || this.edits.has(index) ? this.said(turn, index) : el("div", { class: "said" }),
      el("div", { class: "replies" }, ...replies),
    );
  }

  said(turn, index) {
    if (this.edits.has(index)) return this.editor(index);
    const copyButton = iconButton("Copy the message", "copy", () => copy(turn.prompt, copyButton));
    return el(
      "section",
      { class: "said", "aria-label": "You said" },
      el("h2", { class: "speaker" }, "You"),
      el(
        "div",
        { class: "body" },
        el("p", { class: "words" }, turn.prompt),
        el("span", { class: "buttons" }, copyButton, iconButton("Edit the message", "edit", () => this.edit(index))),
      ),
    );
  }

  /** The message in a box of its own; sending it drops what came after. */
  edit(index) {
    const place = this.region.querySelector(`[data-turn="${index}"] .said`);
    if (!place) return;
    if (!this.edits.has(index)) {
      const { prompt } = this.app.conversation.turns[index];
      this.edits.set(index, { box: this.editBox(index, prompt), prompt });
      place.replaceWith(this.editor(index));
    }
    const { box } = this.edits.get(index);
    grow(box);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }

  editBox(index, prompt) {
    const box = el("textarea", { "aria-label": "Your message, changed", rows: 1 });
    box.value = prompt;
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.endEdit(index);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.sendEdit(index);
      }
    });
    box.addEventListener("input", () => grow(box));
    return box;
  }

  endEdit(index) {
    this.edits.delete(index);
    this.app.draw();
  }

  sendEdit(index) {
    const prompt = this.edits.get(index).box.value;
    if (!prompt.trim()) return;
    this.edits.delete(index);
    this.app.changePrompt(index, prompt);
  }

  editor(index) {
    const later = this.app.conversation.turns.length - index - 1;
    return el(
      "section",
      { class: "said", "aria-label": "You said" },
      el("h2", { class: "speaker" }, "You"),
      el(
        "div",
        { class: "body editing" },
        this.edits.get(index).box,
        el(
          "div",
          { class: "row" },
          el("small", {}, later ? `The ${later === 1 ? "turn" : `${later} turns`} after it will go.` : ""),
          el("button", { type: "button", class: "plain", onclick: () => this.endEdit(index) }, "Cancel"),
          el("button", { type: "button", class: "strong", onclick: () => this.sendEdit(index) }, "Send"),
        ),
      ),
    );
  }

  update(reply, running) {
    const near = this.atEnd();
    this.views.get(reply)?.update(running);
    if (near) this.toEnd();
  }

  replyOf(node) {
    return this.elements.get(node.closest(".reply"));
  }

  /** Is the reader at the end? Who has scrolled up is left there. */
  atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  /** What the reader has at the top, to find it again in another layout; null at the end. */
  place() {
    if (this.atEnd()) return null;
    const { top } = this.scroller.getBoundingClientRect();
    for (const [turn, article] of [...this.region.querySelectorAll(".turn")].entries()) {
      for (const [block, node] of blocksOf(article).entries()) {
        const { top: from, bottom } = node.getBoundingClientRect();
        if (bottom > top) return { turn, block, below: from - top };
      }
    }
    return null;
  }

  returnTo({ turn, block, below }) {
    const article = this.region.querySelectorAll(".turn")[turn];
    const node = article && (blocksOf(article)[block] ?? article);
    if (!node) return this.toEnd();
    const { top } = this.scroller.getBoundingClientRect();
    this.scroller.scrollTop += node.getBoundingClientRect().top - top - below;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** A box as high as its text, up to the height that the style sheet allows. */
export function grow(box) {
  box.style.setProperty("height", "auto");
  box.style.setProperty("height", `${box.scrollHeight}px`);
}
