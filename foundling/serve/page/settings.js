// How a side replies: system prompt and sampling, and the panel in which they are set.

import { byId, el, iconButton } from "./dom.js";

const KEY = "foundling.settings";

const within = (value, low, high, otherwise) =>
  Number.isFinite(value) && value >= low && value <= high ? value : otherwise;
const whole = (value, low) => (Number.isInteger(value) && value >= low ? value : null);

/** A side out of anything: each field checked, others dropped. */
export function sideFrom(value) {
  const given = typeof value === "object" && value !== null ? value : {};
  return {
    model: typeof given.model === "string" ? given.model : "",
    system: typeof given.system === "string" ? given.system : "",
    temperature: within(given.temperature, 0, 2, 0.7),
    top_p: within(given.top_p, 0.01, 1, 1),
    top_k: whole(given.top_k, 1),
    max_tokens: whole(given.max_tokens, 1),
    seed: whole(given.seed, 0),
    stop: (Array.isArray(given.stop) ? given.stop : [])
      .filter((stop) => typeof stop === "string" && stop)
      .slice(0, 4),
  };
}

/** A side as a model is best met: what it knows exactly is asked without chance. */
export function sideFor(model) {
  return sideFrom({ model: model.id, temperature: model.is_hamlet && model.can_chat ? 0 : 0.7 });
}

/** The settings that the next conversation begins with, if this model was used last. */
export function keptSide(model) {
  try {
    const kept = sideFrom(JSON.parse(localStorage.getItem(KEY)));
    return kept.model === model.id ? kept : sideFor(model);
  } catch {
    return sideFor(model);
  }
}

export function keepSide(side) {
  try {
    localStorage.setItem(KEY, JSON.stringify(side));
  } catch {
    // Without storage the next conversation begins with the defaults.
  }
}

/** What differs from the usual, in a few words: it tells two sides apart. */
export function inWords(side) {
  const words = [`temperature ${side.temperature}`];
  if (side.temperature > 0 && side.top_p < 1) words.push(`top-p ${side.top_p}`);
  if (side.temperature > 0 && side.top_k) words.push(`top-k ${side.top_k}`);
  if (side.seed !== null) words.push(`seed ${side.seed}`);
  if (side.system) words.push("system prompt");
  return words.join(", ");
}

const NUMBERS = [
  ["top_k", "Top-k", "all", 1, "Only so many of the likeliest tokens."],
  ["max_tokens", "Longest reply", "to its end", 1, "In tokens."],
  ["seed", "Seed", "by chance", 0, "The same number gives the same reply."],
];

function slider(side, name, said, low, high, step, explained, changed) {
  const id = `${name}-${side.at}`;
  const value = el("output", { for: id }, String(side.of[name]));
  const range = el("input", {
    id,
    type: "range",
    min: low,
    max: high,
    step,
    value: side.of[name],
    "aria-describedby": `${id}-hint`,
    oninput: () => {
      side.of[name] = Number(range.value);
      value.textContent = range.value;
      changed();
    },
  });
  return el(
    "div",
    { class: "field" },
    el("div", { class: "line" }, el("label", { for: id }, said), value),
    range,
    el("small", { id: `${id}-hint` }, explained),
  );
}

function numberField(side, [name, said, empty, low, explained], changed) {
  const id = `${name}-${side.at}`;
  const field = el("input", {
    id,
    type: "number",
    min: low,
    step: 1,
    inputmode: "numeric",
    placeholder: empty,
    value: side.of[name],
    "aria-describedby": `${id}-hint`,
    oninput: () => {
      const given = field.value === "" ? null : whole(Number(field.value), low);
      const refused = field.value !== "" && given === null;
      field.setAttribute("aria-invalid", String(refused));
      if (refused) return;
      side.of[name] = given;
      changed();
    },
  });
  return el(
    "div",
    { class: "field" },
    el("div", { class: "line" }, el("label", { for: id }, said), field),
    el("small", { id: `${id}-hint` }, explained),
  );
}

function area(side, name, said, properties, read) {
  const id = `${name}-${side.at}`;
  const field = el("textarea", { id, ...properties, oninput: () => read(field.value) });
  field.value = name === "stop" ? side.of.stop.join("\n") : side.of[name];
  return el("div", { class: "field" }, el("label", { for: id }, said), field);
}

function sideFields(conversation, at, canChat, changed, redraw) {
  const side = { of: conversation.sides[at], at };
  const reset = () => {
    conversation.sides[at] = sideFrom({ model: side.of.model, temperature: canChat.usual });
    changed();
    redraw();
  };
  return el(
    "fieldset",
    {},
    conversation.sides.length > 1 ? el("legend", {}, `Side ${"AB"[at]}, ${side.of.model}`) : null,
    canChat.chat
      ? area(side, "system", "System prompt", { rows: 3, placeholder: "None" }, (value) => {
          side.of.system = value;
          changed();
        })
      : null,
    slider(side, "temperature", "Temperature", 0, 2, 0.05, "0 always takes the likeliest token.", changed),
    slider(side, "top_p", "Top-p", 0.05, 1, 0.01, "Only the likeliest tokens that make up this share.", changed),
    ...NUMBERS.map((row) => numberField(side, row, changed)),
    area(side, "stop", "Stop at", { rows: 2, placeholder: "One text a line, four at most" }, (value) => {
      side.of.stop = value.split("\n").filter(Boolean).slice(0, 4);
      changed();
    }),
    el("button", { type: "button", class: "plain", onclick: reset }, "Back to the usual"),
  );
}

/** Draws the panel for this conversation; `changed` is called after every change. */
export function drawSettings(conversation, modelOf, changed, close) {
  const panel = byId("settings");
  const redraw = () => drawSettings(conversation, modelOf, changed, close);
  const fields = conversation.sides.map((side, at) => {
    const model = modelOf(side.model);
    const usual = model ? sideFor(model).temperature : 0.7;
    return sideFields(conversation, at, { chat: model?.can_chat ?? true, usual }, changed, redraw);
  });
  panel.replaceChildren(
    el(
      "div",
      { class: "panel-head" },
      el("h2", {}, "Settings"),
      iconButton("Close the settings", "close", close),
    ),
    el("p", { class: "note" }, "They hold from the next reply on, and for new conversations with this model."),
    ...fields,
  );
}
