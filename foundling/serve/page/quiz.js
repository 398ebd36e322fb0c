// Questions about Hamlet, whose truth the server knows: which to offer, and whether a reply is right.

import { grade, questions } from "./server.js";

export class Quiz {
  constructor() {
    this.byModel = new Map();
  }

  /** Asks the server for a Hamlet model's questions, once. */
  async load(model) {
    if (!model?.is_hamlet || !model.can_chat || this.byModel.has(model.id)) return;
    this.byModel.set(model.id, []);
    try {
      const found = await questions(model.id);
      this.byModel.set(model.id, found.map(({ question }) => question));
    } catch {
      this.byModel.delete(model.id); // asked again with the next conversation
    }
  }

  /** Some questions that this conversation does not have yet, by chance. */
  offer(model, conversation, count) {
    const asked = new Set(conversation.turns.map((turn) => turn.prompt));
    const left = (this.byModel.get(model?.id) ?? []).filter((question) => !asked.has(question));
    for (let n = 0; n < Math.min(count, left.length); n += 1) {
      const other = n + Math.floor(Math.random() * (left.length - n));
      [left[n], left[other]] = [left[other], left[n]];
    }
    return left.slice(0, count);
  }

  knows(model, prompt) {
    return (this.byModel.get(model?.id) ?? []).includes(prompt);
  }

  /** {correct, truth} of a whole reply; null where the server cannot tell. */
  async grade(model, prompt, reply) {
    if (reply.ended !== "stop" && reply.ended !== "length") return null;
    try {
      const { correct, truth } = await grade(model.id, prompt, reply.text);
      return { correct, truth };
    } catch {
      return null;
    }
  }
}

/** "7 of 8 right", for each side; empty where nothing was graded. */
export function tally(conversation) {
  return conversation.sides.map((_, at) => {
    const verdicts = conversation.turns.map((turn) => turn.replies[at]?.verdict).filter(Boolean);
    const right = verdicts.filter((verdict) => verdict.correct).length;
    return verdicts.length ? `${right} of ${verdicts.length} right` : "";
  });
}
