// The server as the page sees it: one request, its refusals as sentences.
//
// A key, where the server asks for one, is the password that the browser itself has asked for: the
// page is not to be had without it, and never sees it.

/** Something that is said begins with a capital; the name of a field stays as it is. */
const capitalised = (said) =>
  /^\p{Ll}+[\s,;]/u.test(said) ? said[0].toUpperCase() + said.slice(1) : said;

/** The server said no; the message is its sentence. */
export class Refusal extends Error {
  constructor(message, status) {
    super(capitalised(message));
    this.status = status;
  }
}

async function sentence(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.detail ?? `The server answered ${response.status}.`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** A response that is well, or a Refusal. `body` makes it a POST. */
export async function request(path, { body, signal } = {}) {
  const headers = { accept: "application/json, text/event-stream" };
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401)
    throw new Refusal("Load the page again and give the key as the password, with any name.", 401);
  throw new Refusal(await sentence(response), response.status);
}

export const info = async () => (await request("page/info")).json();

export const questions = async (model) =>
  (await (await request(`page/questions?model=${encodeURIComponent(model)}`)).json()).questions;

export const grade = async (model, question, answer) =>
  (await request("page/grade", { body: { model, question, answer } })).json();

/** How many tokens a text or a conversation has, as the model would read it. */
export const tokenCount = async (model, what, signal) =>
  (await (await request("tokenize", { body: { model, ...what }, signal })).json()).count;
