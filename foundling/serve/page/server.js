// The server as the page sees it: one request, the key it may ask for, its refusals as sentences.

import { byId } from "./dom.js";

const KEY = "foundling.key";

/** The server said no; the message is its sentence. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function keptKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

let asking = null;

/** Asks for the key, once for all requests that wait for it; null where the reader declines. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key");
    const field = byId("key-value");
    field.value = "";
    if (keptKey()) byId("key-said").textContent = "The server did not take that key. Try another.";
    dialog.returnValue = "";
    byId("key-cancel").onclick = () => dialog.close();
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const key = dialog.returnValue === "ok" ? field.value.trim() : "";
        field.value = "";
        if (key) sessionStorage.setItem(KEY, key);
        resolve(key || null);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
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
  for (;;) {
    const key = keptKey();
    const headers = { accept: "application/json, text/event-stream" };
    if (key) headers.authorization = `Bearer ${key}`;
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
    if (response.status !== 401) throw new Refusal(await sentence(response), response.status);
    const other = keptKey();
    // Another request may have been given the key while this one was on its way.
    if (other === key && !(await askForKey())) throw new Refusal(await sentence(response), 401);
  }
}

export const info = async () => (await request("page/info")).json();

export const questions = async (model) =>
  (await (await request(`page/questions?model=${encodeURIComponent(model)}`)).json()).questions;

export const grade = async (model, question, answer) =>
  (await request("page/grade", { body: { model, question, answer } })).json();
