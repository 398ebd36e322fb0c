// The page: which conversation is shown, what is sent, what runs, and which key does what.

import { announce, byId, dropToast, el, icon, toast } from "./dom.js";
import { drawSides, otherSide } from "./compare.js";
import { fitted } from "./context.js";
import { Conversations, newConversation, newReply, titleOf } from "./conversations.js";
import { placer, watchTokens } from "./probabilities.js";
import { Quiz, tally } from "./quiz.js";
import { info } from "./server.js";
import { drawSettings, keepSide, keptSide } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { reply as streamed } from "./stream.js";
import { grow, Thread } from "./thread.js";

/** Of a reply that has ended, so much is read out. */
const SPOKEN = 600;

class App {
  constructor(kept, { models, version }) {
    this.kept = kept;
    this.models = models;
    this.running = new Map();
    this.narrow = matchMedia("(max-width: 60rem)");
    this.quiz = new Quiz();
    this.prompt = byId("prompt");
    this.suggested = "";
    // Without a server nothing here would do anything: until now it could not be pressed.
    for (const control of document.querySelectorAll(":disabled")) control.disabled = false;
    this.thread = new Thread(byId("thread"), byId("scroll"), this);
    this.card = watchTokens(byId("scroll"), (node) => this.thread.replyOf(node));
    this.sidebar = new Sidebar(this);
    this.sidebar.search.value = "";
    byId("version").textContent = version ?? "";
    kept.onchange = (id) => this.changedElsewhere(id);
    kept.onfull = () =>
      toast("The browser could not keep this: export what matters, then delete what does not.");
    this.listen();
    const last = kept.all.get(location.hash.slice(1));
    if (last) this.show(last);
    else this.begin();
  }

  modelOf(id) {
    return this.models.find((model) => model.id === id);
  }

  isRunning(reply) {
    return this.running.has(reply);
  }

  get isBusy() {
    return this.conversation.turns.some((turn) => turn.replies.some((reply) => this.running.has(reply)));
  }

  get model() {
    return this.modelOf(this.conversation.sides[0].model);
  }

  get canChat() {
    return this.conversation.sides.some((side) => this.modelOf(side.model)?.can_chat ?? true);
  }

  // Which conversation is shown.

  begin() {
    const last = this.conversation && this.modelOf(this.conversation.sides[0].model);
    this.show(newConversation([keptSide(last ?? this.models[0])]));
    this.focusPrompt();
  }

  open(id) {
    const conversation = this.kept.all.get(id);
    if (conversation) this.show(conversation);
  }

  show(conversation) {
    this.conversation = conversation;
    const address = conversation.turns.length ? `#${conversation.id}` : location.pathname;
    history.replaceState(null, "", address);
    this.draw();
    for (const side of conversation.sides)
      this.quiz.load(this.modelOf(side.model)).then(() => this.drawEmpty());
  }

  changedElsewhere(id) {
    if (id === this.conversation.id) this.reopen();
    this.sidebar.draw();
  }

  /** Shows the conversation as it is kept now, where it has come from elsewhere. */
  reopen() {
    const kept = this.kept.all.get(this.conversation.id);
    if (!kept || kept === this.conversation || this.isBusy) return;
    dropToast();
    this.show(kept);
  }

  draw() {
    const focused = document.activeElement;
    const within = byId("thread").contains(focused);
    const place = this.thread.place();
    this.drawFrame();
    this.thread.show(this.conversation, place);
    if (within && focused.isConnected) focused.focus({ preventScroll: true });
    else if (within) this.focusPrompt();
    this.drawEmpty();
    if (!byId("settings").hidden) this.drawSettings();
  }

  /** All around the thread: title, list, sides, the box. */
  drawFrame() {
    this.drawTitle();
    this.sidebar.draw();
    this.drawSides();
    const { prompt, canChat } = this;
    byId("prompt-label").textContent = canChat ? "Message" : "Text to go on from";
    prompt.placeholder = canChat ? `Message ${this.addressee}` : "Begin a text";
    this.drawSend();
  }

  get addressee() {
    return this.conversation.sides.length > 1 ? "both" : (this.model?.id ?? "a model");
  }

  drawTitle() {
    const title = titleOf(this.conversation);
    byId("title").textContent = title;
    document.title = this.conversation.turns.length ? `${title} · foundling` : "foundling";
  }

  drawSides() {
    drawSides(this.conversation, this.models, tally(this.conversation), (at, id) => {
      const { sides } = this.conversation;
      sides[at] = { ...keptSide(this.modelOf(id)), system: sides[at].system };
      this.sidesChanged();
    });
  }

  drawSend() {
    const button = byId("send");
    const busy = this.isBusy;
    button.setAttribute("aria-label", busy ? "Stop" : "Send");
    button.querySelector("use").setAttribute("href", busy ? "#icon-stop" : "#icon-send");
    button.classList.toggle("busy", busy);
    button.disabled = !busy && !this.prompt.value.trim();
    this.drawAsk();
  }

  /** A question is suggested in an empty box, or in place of one that was: never over a draft. */
  drawAsk() {
    const free = [this.suggested, ""].includes(this.prompt.value);
    byId("ask").hidden = !free || !this.quiz.offer(this.model, this.conversation, 1).length;
  }

  drawEmpty() {
    this.drawAsk();
    byId("empty")?.remove();
    if (this.conversation.turns.length) return;
    const { model } = this;
    const offered = this.quiz.offer(model, this.conversation, 4);
    const said = this.canChat ? "Say something to " : "Begin a text for ";
    const questions = offered.map((question) =>
      el("li", {}, el("button", { type: "button", onclick: () => this.send(question) }, el("span", {}, question), icon("onward"))),
    );
    byId("thread").append(
      el(
        "div",
        { id: "empty" },
        el("p", { class: "greeting" }, said, el("em", {}, this.addressee)),
        el("p", { class: "lead" }, offered.length ? "Ask about its village. The answers to these are known." : this.lead),
        offered.length ? el("ul", { class: "questions", "aria-label": "Questions with known answers" }, ...questions) : null,
      ),
    );
  }

  /** What one meets, where no question is offered. */
  get lead() {
    const { context } = this.model ?? {};
    const sees = context ? ` It sees ${context.toLocaleString("en")} tokens at a time.` : "";
    if (this.conversation.sides.length > 1) return "One text, two sides: see what each makes of it.";
    return this.canChat
      ? `You raised it; now hear it.${sees}`
      : `It is a base model: it goes on with what you write.${sees}`;
  }

  drawSettings() {
    drawSettings(
      this.conversation,
      (id) => this.modelOf(id),
      () => this.settingsChanged(),
      () => this.toggleSettings(false),
    );
  }

  // What is sent, and what comes.

  send(prompt) {
    if (!prompt.trim() || this.isBusy) return;
    dropToast();
    this.ask(prompt);
  }

  ask(prompt) {
    const { conversation } = this;
    const turn = {
      prompt,
      question: conversation.sides.some((side) => this.quiz.knows(this.modelOf(side.model), prompt)),
      replies: conversation.sides.map((side) => newReply(side.model)),
    };
    conversation.turns.push(turn);
    this.run(conversation.turns.length - 1, turn.replies.keys());
  }

  /** Starts the replies of a turn on these sides, and shows that they run. */
  run(index, sides) {
    const { conversation } = this;
    for (const at of sides) this.stream(conversation, index, at);
    conversation.updated = Date.now();
    this.kept.save(conversation);
    history.replaceState(null, "", `#${conversation.id}`);
    this.draw();
    if (index === conversation.turns.length - 1) this.thread.toEnd();
    announce("Replying");
  }

  /** What the model of a side is asked: the turns as that side had them. */
  requestFor(conversation, index, at) {
    const side = conversation.sides[at];
    const model = this.modelOf(side.model);
    const turn = conversation.turns[index];
    if (!model.can_chat) return { model, side, text: turn.prompt + turn.replies[at].text };
    const messages = conversation.turns.slice(0, index).flatMap(({ prompt, replies }) => {
      const said = (replies[at] ?? replies[0])?.text;
      // What was refused or stopped before its first word never happened.
      return said ? [{ role: "user", content: prompt }, { role: "assistant", content: said }] : [];
    });
    return { model, side, messages: [...messages, { role: "user", content: turn.prompt }] };
  }

  async stream(conversation, index, at) {
    const turn = conversation.turns[index];
    const reply = turn.replies[at];
    const model = this.modelOf(conversation.sides[at].model);
    if (!model) {
      reply.ended = "error";
      reply.error = `The model ${reply.model} is not here: choose another above.`;
      return;
    }
    const stopper = new AbortController();
    const began = performance.now();
    const seconds = () => (performance.now() - began) / 1000;
    const place = placer(reply);
    let saved = began;
    this.running.set(reply, stopper);
    Object.assign(reply, { ended: null, error: null, first: null, usage: null, left: 0 });
    try {
      const asked = await fitted(this.requestFor(conversation, index, at), stopper.signal);
      reply.left = asked.left ?? 0;
      for await (const piece of streamed(asked, stopper.signal)) {
        if (piece.text || piece.tokens.length) {
          reply.first ??= seconds();
          reply.seconds = seconds();
          place(piece.text, piece.tokens);
        }
        reply.ended = piece.ended ?? reply.ended;
        reply.usage = piece.usage ?? reply.usage;
        this.drawSoon(reply);
        if (performance.now() - saved > 1000) {
          saved = performance.now();
          this.kept.save(conversation);
        }
      }
      reply.ended ??= "stop";
    } catch (error) {
      reply.ended = error.name === "AbortError" ? "stopped" : "error";
      if (reply.ended === "error") reply.error = error.message;
    }
    this.running.delete(reply);
    // A reply that was replaced or deleted meanwhile is nobody's any more.
    if (turn.replies[at] === reply && this.kept.all.has(conversation.id)) {
      await this.finish(conversation, turn, at);
    }
  }

  async finish(conversation, turn, at) {
    const reply = turn.replies[at];
    const shown = () => this.conversation === conversation;
    if (shown()) {
      this.thread.update(reply, false);
      this.drawSides();
      this.drawSend();
      announce(reply.error ?? `${reply.model}: ${reply.text.slice(0, SPOKEN)}`);
    }
    const model = this.modelOf(reply.model);
    if (turn.question && model?.is_hamlet) {
      reply.verdict = await this.quiz.grade(model, turn.prompt, reply);
      if (shown()) {
        this.thread.update(reply, false);
        this.drawSides();
        if (reply.verdict) announce(reply.verdict.correct ? "Right" : `Wrong. The truth: ${reply.verdict.truth}`);
      }
    }
    conversation.updated = Date.now();
    await this.kept.save(conversation);
    this.sidebar.draw();
  }

  /** Not for every token: once before the next picture is drawn. */
  drawSoon(reply) {
    this.waiting ??= new Set();
    if (!this.waiting.size) {
      requestAnimationFrame(() => {
        for (const one of this.waiting) this.thread.update(one, this.isRunning(one));
        this.waiting.clear();
      });
    }
    this.waiting.add(reply);
  }

  stop(conversation = this.conversation) {
    for (const reply of conversation.turns.flatMap((turn) => turn.replies)) {
      if (!this.running.has(reply)) continue;
      this.running.get(reply).abort();
      reply.ended = "stopped";
    }
  }

  // What changes a turn. What it takes away can be had back, until something new is said.

  withUndo(said, change) {
    const { conversation } = this;
    this.stop();
    dropToast();
    const before = structuredClone(conversation.turns);
    change(conversation);
    if (said)
      toast(said, {
        name: "Undo",
        run: () => {
          this.stop(conversation);
          conversation.turns = before;
          conversation.updated = Date.now();
          this.kept.save(conversation);
          if (this.conversation === conversation) this.draw();
        },
      });
  }

  changePrompt(index, prompt) {
    const later = this.conversation.turns.length - index - 1;
    this.withUndo(later ? "The turns after it are gone." : "", (conversation) => {
      conversation.turns.splice(index);
    });
    this.ask(prompt);
    this.focusPrompt();
  }

  again(index, ...sides) {
    const later = this.conversation.turns.length - index - 1;
    const here = sides.filter((at) => at < this.conversation.sides.length);
    if (!here.length) return;
    this.withUndo(later ? "The turns after it are gone." : "The reply is replaced.", (conversation) => {
      conversation.turns.splice(index + 1);
      const { replies } = conversation.turns[index];
      // A turn that had two sides may be asked again with one, and the other way round.
      replies.splice(conversation.sides.length);
      for (const at of here) replies[at] = newReply(conversation.sides[at].model);
    });
    this.run(index, here);
  }

  /** A base model writes on where it stopped. */
  goOn(index, at) {
    if (this.isBusy || !this.conversation.sides[at]) return;
    dropToast();
    this.run(index, [at]);
  }

  /** Asks in a new conversation what was refused in this one. */
  askElsewhere(index) {
    const { turns, sides } = this.conversation;
    const { prompt, replies } = turns[index];
    if (!replies.some((reply) => reply?.text)) turns.splice(index, 1);
    this.stop();
    this.kept.save(this.conversation);
    this.show(newConversation(structuredClone(sides)));
    this.send(prompt);
  }

  // Sides and settings.

  toggleCompare() {
    const { sides } = this.conversation;
    if (sides.length > 1) sides.pop();
    else sides.push(otherSide(sides[0], this.models));
    this.sidesChanged();
    announce(sides.length > 1 ? "Two sides" : "One side");
  }

  sidesChanged() {
    this.settingsChanged();
    this.draw();
    for (const side of this.conversation.sides)
      this.quiz.load(this.modelOf(side.model)).then(() => this.drawEmpty());
  }

  settingsChanged() {
    keepSide(this.conversation.sides[0]);
    this.drawSides();
    if (this.conversation.turns.length) this.kept.save(this.conversation);
  }

  toggleSettings(open = byId("settings").hidden) {
    if (open) this.sidebar.close();
    byId("settings").hidden = !open;
    document.body.classList.toggle("setting", open);
    this.coverStage();
    byId("show-settings").setAttribute("aria-expanded", String(open));
    if (open) {
      this.drawSettings();
      byId("settings").querySelector("textarea, input")?.focus();
    } else byId("show-settings").focus();
  }

  /** On a narrow window the settings lie over the conversation, which cannot be reached meanwhile. */
  coverStage() {
    const over = this.narrow.matches && !byId("settings").hidden;
    byId("stage").inert = over || this.sidebar.isOpen;
  }

  focusPrompt() {
    // On a phone the keyboard would cover what was just opened.
    if (matchMedia("(pointer: fine)").matches) this.prompt.focus();
  }

  // Keys and clicks.

  listen() {
    const { prompt } = this;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.stop();
      else this.sendPrompt();
    });
    prompt.addEventListener("input", () => {
      grow(prompt);
      this.drawSend();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.sendPrompt();
      } else if (event.key === "ArrowUp" && !prompt.value && this.conversation.turns.length) {
        event.preventDefault();
        this.thread.edit(this.conversation.turns.length - 1);
      }
    });
    byId("ask").addEventListener("click", () => {
      [this.suggested] = this.quiz.offer(this.model, this.conversation, 1);
      prompt.value = this.suggested;
      grow(prompt);
      this.drawSend();
      prompt.focus();
    });
    byId("compare").addEventListener("click", () => this.toggleCompare());
    byId("show-settings").addEventListener("click", () => this.toggleSettings());
    byId("show-keys").addEventListener("click", () => byId("keys").showModal());
    byId("veil").addEventListener("click", () => !byId("settings").hidden && this.toggleSettings(false));
    this.narrow.addEventListener("change", () => this.coverStage());
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("pagehide", () => this.isBusy && this.kept.save(this.conversation));
  }

  sendPrompt() {
    const { prompt } = this;
    if (!prompt.value.trim() || this.isBusy) return;
    const said = prompt.value;
    prompt.value = "";
    grow(prompt);
    this.send(said);
  }

  key(event) {
    const command = event.ctrlKey || event.metaKey;
    const modal = document.querySelector("dialog[open]");
    if (event.key === "Escape") {
      if (modal) return; // the dialog closes itself
      if (this.card.isShown()) this.card.hide();
      else if (this.sidebar.isOpen) this.sidebar.close();
      else if (this.isBusy) this.stop();
      else if (!byId("settings").hidden) this.toggleSettings(false);
      return;
    }
    if (modal) return;
    const act = command
      ? { KeyK: () => this.find(), Slash: () => byId("keys").showModal() }[event.code]
      : event.altKey &&
        {
          KeyN: () => this.begin(),
          KeyR: () => this.againLast(),
          KeyC: () => this.toggleCompare(),
          KeyS: () => this.toggleSettings(),
        }[event.code];
    if (!act) return;
    event.preventDefault();
    act();
  }

  find() {
    // On a middling window the settings stand where the list was, on a narrow one the list is a drawer.
    if (!this.sidebar.search.checkVisibility({ visibilityProperty: true })) {
      if (!byId("settings").hidden) this.toggleSettings(false);
      if (this.narrow.matches) this.sidebar.open();
    }
    this.sidebar.search.focus();
  }

  againLast() {
    const index = this.conversation.turns.length - 1;
    if (index >= 0 && !this.isBusy) this.again(index, ...this.conversation.sides.keys());
  }
}

async function start() {
  const [kept, about] = await Promise.all([Conversations.open(), info()]);
  if (!about.models.length) throw new Error("The server has no model.");
  new App(kept, about);
  if (!kept.lasting) toast("This browser keeps nothing here: conversations end with the page.");
}

start().catch((error) => {
  document.body.classList.add("closed");
  byId("thread").replaceChildren(
    el(
      "div",
      { id: "empty" },
      el("p", { class: "greeting" }, error.status === 401 ? "A key is needed." : "Nobody is there."),
      el("p", { class: "lead" }, error.message),
      el("button", { type: "button", class: "strong", onclick: () => location.reload() }, "Try again"),
    ),
  );
});
