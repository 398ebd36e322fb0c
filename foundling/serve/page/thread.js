// The conversation as it stands: turns with their replies, what can be done with each, what they cost.

import { copy, el, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { makeReachable, tokenLeaf } from "./probabilities.js";

const whole = new Intl.NumberFormat("en");

/** Shorter than this, a clock tells nothing. */
const SHORTEST = 0.1;

/** Tokens a second, from the first token to the last. */
export function speed(reply) {
  const tokens = reply.usage?.completion_tokens ?? reply.tokens.length;
  const seconds = (reply.seconds ?? 0) - (reply.first ?? 0);
  return tokens > 1 && seconds > SHORTEST ? (tokens - 1) / seconds : null;
}

function factsOf(reply, running) {
  const facts = [];
  const tokens = reply.usage?.completion_tokens ?? reply.tokens.length;
  if (tokens) facts.push(`${whole.format(tokens)} token${tokens === 1 ? "" : "s"}`);
  const rate = speed(reply);
  if (rate) facts.push(`${rate < 10 ? rate.toFixed(1) : whole.format(Math.round(rate))} tokens/s`);
  if (!running && reply.first !== null) facts.push(`first after ${reply.first.toFixed(2)} s`);
  const ends = {
    length: "cut at the longest length",
    stopped: "stopped by you",
    error: null,
    stop: null,
  };
  if (!running) {
    const end = reply.ended === null ? "cut off when the page was left" : ends[reply.ended];
    if (end) facts.push(end);
    else if (!reply.text && !reply.error) facts.push("it said nothing");
  }
  return facts.join(" · ");
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
  constructor(reply, { prompt, name, canChat, actions, offered }) {
    this.reply = reply;
    this.canChat = canChat;
    this.text = el("div", { class: canChat ? "text" : "text written" });
    this.given = canChat ? null : el("span", { class: "given" }, prompt);
    this.more = canChat ? null : el("span");
    if (!canChat) this.text.append(this.given, this.more);
    this.verdict = el("div", { class: "verdict-place" });
    this.error = el("div", { class: "error-place" });
    this.facts = el("span", { class: "facts" });
    this.copy = iconButton("Copy the reply", "copy", () => copy(reply.text, this.copy));
    this.odds = iconButton("Show how sure it was", "odds", () => this.showOdds(), { "aria-pressed": "false" });
    this.buttons = el(
      "span",
      { class: "buttons" },
      this.copy,
      this.odds,
      iconButton("Again", "again", actions.again),
      canChat ? null : iconButton("Go on", "onward", actions.goOn),
      canChat ? null : iconButton("Edit the text", "edit", actions.edit),
    );
    this.root = el(
      "section",
      { class: "reply", "aria-label": `${name} replies` },
      el("h2", { class: "speaker" }, name),
      el("div", { class: "body" }, this.text, this.verdict, this.error, el("div", { class: "foot" }, this.facts, this.buttons)),
    );
    this.offered = offered;
  }

  /** Tints each token by how sure the model was. */
  showOdds() {
    const on = this.text.classList.toggle("odds");
    this.odds.setAttribute("aria-pressed", String(on));
  }

  update(running) {
    const { reply } = this;
    const leaf = tokenLeaf(reply);
    if (this.canChat) render(this.text, reply.text, leaf);
    else this.more.replaceChildren(...leaf(reply.text, 0));
    makeReachable(this.text);
    this.root.classList.toggle("running", running);
    this.root.setAttribute("aria-busy", String(running));
    this.facts.textContent = factsOf(reply, running);
    this.buttons.hidden = running;
    this.copy.hidden = this.odds.hidden = !reply.text;
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

/** The region that shows a conversation. */
export class Thread {
  constructor(region, scroller, app) {
    this.region = region;
    this.scroller = scroller;
    this.app = app;
    this.views = new Map();
    this.elements = new WeakMap();
  }

  /** Draws it anew; called when turns or sides have changed, not while a reply streams. */
  show(conversation) {
    this.views.clear();
    this.region.classList.toggle("comparing", conversation.sides.length > 1);
    const turns = conversation.turns.map((turn, index) => this.turn(conversation, turn, index));
    this.region.replaceChildren(...turns);
    for (const view of this.views.values()) view.update(this.app.isRunning(view.reply));
    this.toEnd();
  }

  turn(conversation, turn, index) {
    const { app } = this;
    const replies = turn.replies.map((reply, side) => {
      if (!reply) return null;
      const model = app.modelOf(reply.model);
      const view = new ReplyView(reply, {
        prompt: turn.prompt,
        name: turn.replies.length > 1 ? `${"AB"[side]} ${reply.model}` : reply.model,
        canChat: model?.can_chat ?? true,
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
      chats ? this.said(turn, index) : el("div", { class: "said" }),
      el("div", { class: "replies" }, ...replies),
    );
  }

  said(turn, index) {
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
    const article = this.region.querySelector(`[data-turn="${index}"]`);
    const place = article?.querySelector(".said");
    if (!place) return;
    const turn = this.app.conversation.turns[index];
    const box = el("textarea", { "aria-label": "Your message, changed", rows: 1 });
    const cancel = () => {
      this.show(this.app.conversation);
      this.app.focusPrompt();
    };
    const send = () => {
      if (box.value.trim()) this.app.changePrompt(index, box.value);
    };
    box.value = turn.prompt;
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    box.addEventListener("input", () => grow(box));
    const later = this.app.conversation.turns.length - index - 1;
    place.replaceChildren(
      el("h2", { class: "speaker" }, "You"),
      el(
        "div",
        { class: "body editing" },
        box,
        el(
          "div",
          { class: "row" },
          el("small", {}, later ? `The ${later === 1 ? "turn" : `${later} turns`} after it will go.` : ""),
          el("button", { type: "button", class: "plain", onclick: cancel }, "Cancel"),
          el("button", { type: "button", class: "strong", onclick: send }, "Send"),
        ),
      ),
    );
    grow(box);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
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

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** A box as high as its text, up to the height that the style sheet allows. */
export function grow(box) {
  box.style.setProperty("height", "auto");
  box.style.setProperty("height", `${box.scrollHeight}px`);
}
