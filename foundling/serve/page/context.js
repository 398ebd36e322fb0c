// What of a conversation the model can read: where it is too long, the oldest exchanges are left out.
//
// As `foundling chat` does it: whole exchanges, so that no turn begins in its middle, and never
// silently. The server counts; it is asked only where the conversation might be too long.

import { tokenCount } from "./server.js";
import { instructed } from "./stream.js";

/** Tokens that are kept free for a reply, where no length is set. */
const RESERVE = 64;
/** At most so many tokens does a template put around a message. */
const AROUND = 16;

/** No text has more tokens than bytes. */
const bytes = (text) => new TextEncoder().encode(text).length + AROUND;

/** Does it fit for certain, without a word of the server? */
const surely = (texts, room) => texts.reduce((sum, text) => sum + bytes(text), 0) <= room;

/** What is asked, with as many messages as fit, and how many were left out; see `reply`. */
async function fittedChat(asked, signal) {
  const { model, side, messages } = asked;
  const room = model.context - (side.max_tokens ?? Math.min(RESERVE, model.context >> 2));
  const without = (exchanges) => instructed(side, messages.slice(2 * exchanges));
  const fits = async (exchanges) =>
    (await tokenCount(model.id, { messages: without(exchanges) }, signal)) <= room;
  const all = without(0).map(({ content }) => content);
  if (messages.length === 1 || surely(all, room) || (await fits(0))) return { ...asked, left: 0 };
  // Without `low` it does not fit; `high` is enough, or all that can be left out.
  let low = 0;
  let high = (messages.length - 1) / 2;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (await fits(middle)) high = middle;
    else low = middle;
  }
  return { ...asked, messages: messages.slice(2 * high), left: 2 * high };
}

/** A base model has no exchanges to leave out: it writes as much as there is room for. */
async function fittedText(asked, signal) {
  const { model, text } = asked;
  if (surely([text], model.context / 2)) return asked;
  return { ...asked, room: model.context - (await tokenCount(model.id, { prompt: text }, signal)) };
}

export async function fitted(asked, signal) {
  if (!asked.model.context) return asked;
  return asked.messages ? fittedChat(asked, signal) : fittedText(asked, signal);
}
