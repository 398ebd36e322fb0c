// A reply as it comes: server-sent events over fetch, chats and completions as one kind of piece.
//
// fetch and not EventSource, which cannot POST.

import { Refusal, request } from "./server.js";

/** How many alternatives are asked for at each token. */
const ALTERNATIVES = 5;
/** What a base model writes at a time where no limit is set: it never ends by itself. */
const COMPLETION_TOKENS = 128;

/** The data of each event, whatever the pieces that the network makes of them. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? "\n\n" : value;
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** What both kinds of request say about sampling: only what differs from the server's default. */
function sampling(side) {
  const asked = { temperature: side.temperature };
  if (side.temperature > 0) {
    if (side.top_p < 1) asked.top_p = side.top_p;
    if (side.top_k) asked.top_k = side.top_k;
  }
  if (side.seed !== null) asked.seed = side.seed;
  if (side.max_tokens) asked.max_tokens = side.max_tokens;
  if (side.stop.length) asked.stop = side.stop;
  return asked;
}

/** Messages with the system prompt of a side before them. */
export function instructed(side, messages) {
  return side.system ? [{ role: "system", content: side.system }, ...messages] : messages;
}

function chatRequest(side, messages) {
  const given = instructed(side, messages);
  return { messages: given, logprobs: true, top_logprobs: ALTERNATIVES, ...sampling(side) };
}

function completionRequest(side, text, context, room) {
  const most = Math.min(COMPLETION_TOKENS, Math.ceil((context || 1024) / 2), room ?? Infinity);
  return { prompt: text, logprobs: ALTERNATIVES, max_tokens: Math.max(1, most), ...sampling(side) };
}

const rounded = (logprob) => Math.round(logprob * 1e4) / 1e4;

/** Alternatives as [text, logprob], the likeliest first. */
const ranked = (pairs) =>
  pairs
    .map(([text, logprob]) => [text, rounded(logprob)])
    .sort((one, other) => other[1] - one[1])
    .slice(0, ALTERNATIVES);

/** Tokens as [text, logprob, alternatives], from the shape of chats or that of completions. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((token) => [
      token.token,
      rounded(token.logprob),
      ranked((token.top_logprobs ?? []).map((other) => [other.token, other.logprob])),
    ]);
  }
  return (logprobs.tokens ?? []).map((token, index) => [
    token,
    rounded(logprobs.token_logprobs?.[index] ?? 0),
    ranked(Object.entries(logprobs.top_logprobs?.[index] ?? {})),
  ]);
}

/**
 * Pieces {text, tokens, ended, usage} of one reply.
 *
 * `asked` is {model, side, messages} for a chat and {model, side, text, room} for a base model, where
 * `room` is how many tokens fit behind the text.
 */
export async function* reply({ model, side, messages, text, room }, signal) {
  const body = messages ? chatRequest(side, messages) : completionRequest(side, text, model.context, room);
  Object.assign(body, {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
  });
  const path = messages ? "v1/chat/completions" : "v1/completions";
  const response = await request(path, { body, signal });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Refusal("The server sent something that is no JSON.", 200);
    }
    if (chunk.error) throw new Refusal(chunk.error.message ?? "The server gave up.", 200);
    const choice = chunk.choices?.[0];
    ended ||= Boolean(choice?.finish_reason);
    yield {
      text: (messages ? choice?.delta?.content : choice?.text) ?? "",
      tokens: tokensOf(choice?.logprobs),
      ended: choice?.finish_reason ?? null,
      usage: chunk.usage ?? null,
    };
  }
  if (!ended) throw new Refusal("The connection ended before the reply did.", 200);
}
