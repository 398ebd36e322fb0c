// One prompt, two sides: another model where the server has two, other settings where it has one.

import { byId, el, icon } from "./dom.js";
import { inWords, keptSide, sideFrom } from "./settings.js";

const whole = new Intl.NumberFormat("en");

/** The other side to begin with: what differs is visible at once. */
export function otherSide(side, models) {
  const other = models.find((model) => model.id !== side.model);
  if (other) return { ...keptSide(other), system: other.can_chat ? side.system : "" };
  return sideFrom({ ...side, temperature: side.temperature > 0 ? 0 : 1 });
}

/** How much of the context the last reply of a side took. */
function contextUsed(conversation, at) {
  const last = conversation.turns.findLast((turn) => turn.replies[at]?.usage)?.replies[at].usage;
  return last ? last.prompt_tokens + last.completion_tokens : 0;
}

function contextMeter(used, context) {
  if (!context) return null;
  const share = Math.min(1, used / context);
  const said = `${whole.format(used)} of ${whole.format(context)} tokens of context`;
  const fill = el("i");
  fill.style.setProperty("--share", share.toFixed(3));
  return el(
    "span",
    {
      class: `context${share > 0.85 ? " nearly" : ""}`,
      role: "meter",
      "aria-label": "Context used",
      "aria-valuemin": 0,
      "aria-valuemax": context,
      "aria-valuenow": Math.min(used, context),
      "aria-valuetext": said,
      title: said,
    },
    fill,
    el("span", {}, `${whole.format(used)} / ${whole.format(context)}`),
  );
}

function modelChoice(side, at, models, chosen) {
  const gone = !models.some((model) => model.id === side.model);
  if (models.length === 1 && !gone) return el("span", { class: "model" }, side.model);
  const select = el(
    "select",
    { class: "model", "aria-label": `Model${at === null ? "" : ` of side ${"AB"[at]}`}`, onchange: () => chosen(select.value) },
    ...models.map((model) => el("option", { value: model.id }, model.id)),
    gone ? el("option", { value: side.model, disabled: true }, `${side.model} (not here)`) : null,
  );
  select.value = side.model;
  return el("span", { class: "choice" }, select, icon("chevron"));
}

/** Draws each side's model, context and settings; `choose(at, model)` is called on a change. */
export function drawSides(conversation, models, tally, choose) {
  const two = conversation.sides.length > 1;
  const region = byId("sides");
  region.closest(".bar").classList.toggle("comparing", two);
  byId("compare").setAttribute("aria-pressed", String(two));
  const focused = [...region.children].findIndex((side) => side.contains(document.activeElement));
  region.replaceChildren(
    ...conversation.sides.map((side, at) => {
      const model = models.find((one) => one.id === side.model);
      const right = tally[at] ? el("span", { class: "tally" }, tally[at]) : null;
      return el(
        "div",
        { class: "side" },
        two ? el("b", { class: "letter", "aria-hidden": "true" }, "AB"[at]) : null,
        modelChoice(side, two ? at : null, models, (id) => choose(at, id)),
        contextMeter(contextUsed(conversation, at), model?.context),
        two ? el("small", {}, el("span", {}, inWords(side)), right) : right,
      );
    }),
  );
  region.children[focused]?.querySelector("select")?.focus();
}
