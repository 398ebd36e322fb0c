// Probabilities: which token wrote which characters, and the card with what else the model weighed.
//
// A token of a reply is [text, logprob, alternatives, start, end]: the last two are its place in the
// reply's text. Pointer and keyboard reach every token; of each reply one is in the tab order.

import { byId, el } from "./dom.js";

const [TEXT, LOGPROB, OTHERS, START, END] = [0, 1, 2, 3, 4];

/**
 * Takes pieces of a reply and gives its tokens their places. Characters can come later than the
 * tokens that begin them (half a UTF-8 character, the beginning of a stop string): those wait.
 */
export function placer(reply) {
  let waiting = [];
  return (text, tokens) => {
    waiting.push(...tokens);
    if (!text) return;
    let at = reply.text.length;
    const end = at + text.length;
    reply.text += text;
    for (const [n, token] of waiting.entries()) {
      const matches = token[TEXT] !== "" && reply.text.startsWith(token[TEXT], at);
      if (!matches) {
        // These do not spell the text one by one: they share what is left of it.
        for (const rest of waiting.slice(n)) reply.tokens.push([...rest.slice(0, 3), at, end]);
        break;
      }
      reply.tokens.push([...token.slice(0, 3), at, at + token[TEXT].length]);
      at += token[TEXT].length;
    }
    waiting = [];
  };
}

const probability = (logprob) => Math.exp(logprob);

/** Tokens are tinted by their probability in five bands: from this on, from this on, ... and below. */
const BANDS = [0.9, 0.6, 0.3, 0.1];

/** 0 where the model was sure, up to 4 where it hardly could know. */
function band(token) {
  return BANDS.filter((limit) => probability(token[LOGPROB]) < limit).length;
}

/** What the tints say, in a line. */
export function legend() {
  const names = [...BANDS.map((limit) => `\u2265${100 * limit}%`), `<${100 * BANDS.at(-1)}%`];
  return el(
    "p",
    { class: "legend" },
    el("b", {}, "Probability"),
    ...names.map((name, n) => el("span", { dataset: { band: n } }, name)),
  );
}

/** The first token that ends behind `at`. */
function firstAt(tokens, at) {
  let low = 0;
  let high = tokens.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle][END] <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The leaf for markdown.js: text as one span a token; `reply` may still grow. */
export function tokenLeaf(reply) {
  return (text, at) => {
    const nodes = [];
    const end = at + text.length;
    let from = at;
    for (let n = firstAt(reply.tokens, at); n < reply.tokens.length && from < end; n += 1) {
      const token = reply.tokens[n];
      if (token[START] >= end) break;
      if (token[END] <= from) continue; // it shares its place with the one before
      if (token[START] > from) nodes.push(text.slice(from - at, token[START] - at));
      const begin = Math.max(from, token[START]);
      const stop = Math.min(end, token[END]);
      nodes.push(
        el(
          "span",
          { class: "token", dataset: { token: n, band: band(token) } },
          text.slice(begin - at, stop - at),
        ),
      );
      from = stop;
    }
    if (from < end) nodes.push(text.slice(from - at));
    return nodes;
  };
}

/** One token of the reply gets a place in the tab order; the arrows reach the others. */
export function makeReachable(container) {
  if (!container.querySelector(".token[tabindex]"))
    container.querySelector(".token")?.setAttribute("tabindex", "0");
}

/** A token as one sees it: spaces and line ends have a shape. */
function visible(text) {
  return text === "" ? "(nothing)" : text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
}

export function percent(logprob) {
  const share = 100 * probability(logprob);
  if (share >= 99.95) return "100%";
  if (share < 0.01) return "< 0.01%";
  return `${share < 1 ? share.toFixed(2) : share.toFixed(1)}%`;
}

function bars(token) {
  const rows = token[OTHERS].map(([text, logprob]) => [text, logprob, text === token[TEXT]]);
  // What was sampled may not be among the likeliest.
  if (!rows.some(([, , chosen]) => chosen)) rows.push([token[TEXT], token[LOGPROB], true]);
  return el(
    "ul",
    {},
    ...rows.map(([text, logprob, chosen]) => {
      const bar = el("i", { "aria-hidden": "true" });
      bar.style.setProperty("--share", probability(logprob).toFixed(4));
      return el(
        "li",
        { class: chosen ? "chosen" : null },
        el("span", { class: "name" }, visible(text)),
        bar,
        el("span", { class: "share" }, percent(logprob)),
      );
    }),
  );
}

function fill(card, tokens, index) {
  const here = tokens[index];
  // Tokens that share a place, as the bytes of one character do, are shown together.
  const together = tokens.filter(
    (token, n) => Math.abs(n - index) < 16 && token[START] === here[START] && token[END] === here[END],
  );
  card.replaceChildren(
    ...together.map((token) =>
      el(
        "section",
        {},
        el(
          "p",
          {},
          el("b", {}, visible(token[TEXT])),
          el("span", {}, `${percent(token[LOGPROB])}`),
          el("small", {}, `log p ${token[LOGPROB].toFixed(2).replace("-0.00", "0.00").replace("-", "\u2212")}`),
        ),
        bars(token),
      ),
    ),
  );
}

function put(card, target) {
  const place = [...target.getClientRects()].find((rect) => rect.width) ?? target.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left + place.width / 2 - width / 2, innerWidth - width - 8));
  const above = place.top - height - 8;
  card.style.setProperty("left", `${left}px`);
  card.style.setProperty("top", `${above > 8 ? above : place.bottom + 8}px`);
}

/** Watches a region for tokens under the pointer or the focus; `replyOf(node)` finds their reply. */
export function watchTokens(region, replyOf) {
  const card = byId("card");
  let shown = null;

  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown?.classList.remove("shown");
    shown = null;
    card.hidden = true;
  };
  const show = (target) => {
    if (target === shown) return;
    hide();
    const tokens = replyOf(target)?.tokens;
    const index = Number(target.dataset.token);
    if (!tokens?.[index]) return;
    fill(card, tokens, index);
    card.hidden = false;
    put(card, target);
    target.setAttribute("aria-describedby", "card");
    target.classList.add("shown");
    shown = target;
  };

  let leaving = 0;
  const leaveSoon = () => {
    clearTimeout(leaving);
    leaving = setTimeout(() => document.activeElement !== shown && hide(), 120);
  };
  region.addEventListener("pointerover", (event) => {
    const target = event.target.closest?.(".token");
    if (target) {
      clearTimeout(leaving);
      show(target);
    } else if (shown) leaveSoon();
  });
  // A finger leaves at once: what it touched stays until it touches something else.
  region.addEventListener("pointerleave", ({ pointerType }) => pointerType !== "touch" && leaveSoon());
  document.addEventListener("pointerdown", ({ target }) => {
    if (shown && !region.contains(target) && !card.contains(target)) hide();
  });
  card.addEventListener("pointerenter", () => clearTimeout(leaving));
  card.addEventListener("pointerleave", leaveSoon);
  region.addEventListener("focusin", ({ target }) => {
    if (target.matches(".token")) show(target);
  });
  region.addEventListener("focusout", hide);
  region.addEventListener("scroll", hide, { passive: true, capture: true });
  region.addEventListener("keydown", (event) => {
    if (!event.target.matches(".token")) return;
    const all = [...event.target.closest(".text").querySelectorAll(".token")];
    const now = all.indexOf(event.target);
    const next = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      Home: 0,
      End: all.length - 1,
    }[event.key];
    if (!all[next]) return;
    event.preventDefault();
    event.target.removeAttribute("tabindex");
    all[next].setAttribute("tabindex", "0");
    all[next].focus();
    all[next].scrollIntoView({ block: "nearest" });
    show(all[next]);
  });
  // What appears on hover goes away with Esc, before Esc does anything else.
  return { isShown: () => !card.hidden, hide };
}
