// Markdown as it streams in, to DOM nodes: made by createElement, so that HTML in a reply is text.
//
// Every character of the source keeps its place: a leaf of text is made by `leaf(text, at)`, where
// `at` is its offset in the source, so that the caller can tell which token wrote it. A library was
// rejected for that, and because what it gives is a string of HTML that must be washed first.
//
// Not known: raw HTML, reference links, footnotes. An image becomes a link: the page loads nothing.

import { copy, el, iconButton } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
/** Deeper than this, quotes, lists and emphasis are text: a reply cannot exhaust the stack. */
const DEEPEST = 12;

const blank = (line) => line.text.trim() === "";
const rest = (line, drop) => ({ text: line.text.slice(drop), at: line.at + drop });

/** The source as lines that know where they begin. */
function linesOf(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}

function isTable(lines, n) {
  const next = lines[n + 1]?.text;
  return next?.includes("|") && lines[n].text.includes("|") && TABLE_RULE.test(next);
}

function beginsBlock(lines, n) {
  const { text } = lines[n];
  const item = text.match(ITEM);
  // As in CommonMark, a paragraph is broken by a list only where that begins with 1 and has text.
  const list = item && item[0].length < text.length && (!/\d/.test(item[2]) || /^1\D/.test(item[2]));
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || list;
}

/** Lines to blocks {type, lines, ...}; `lines` are what the block was made of. */
function blocksOf(lines, deep = 0) {
  const blocks = [];
  let n = 0;
  while (n < lines.length) {
    if (blank(lines[n])) n += 1;
    else {
      const block = deep < DEEPEST ? blockAt(lines, n, deep) : paragraphAt(lines, n, true);
      blocks.push({ ...block, from: lines[n].at });
      n = block.end;
    }
  }
  return blocks;
}

function blockAt(lines, n, deep) {
  const { text } = lines[n];
  const fence = text.match(FENCE);
  if (fence) return fenceAt(lines, n, fence);
  const heading = text.match(HEADING);
  if (heading) {
    const from = text.indexOf(heading[2] ?? "", text.indexOf(heading[1]) + heading[1].length);
    const title = { text: heading[2] ?? "", at: lines[n].at + Math.max(0, from) };
    return { type: "heading", level: heading[1].length, inside: [title], end: n + 1 };
  }
  if (RULE.test(text)) return { type: "rule", end: n + 1 };
  if (QUOTE.test(text)) return quoteAt(lines, n, deep);
  if (ITEM.test(text) && text.match(ITEM)[1].length < 4) return listAt(lines, n, deep);
  if (isTable(lines, n)) return tableAt(lines, n);
  return paragraphAt(lines, n, false);
}

function fenceAt(lines, n, [, indent, marks, name]) {
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = n + 1;
  const inside = [];
  while (end < lines.length && !closing.test(lines[end].text)) {
    const lead = lines[end].text.match(/^ */)[0].length;
    inside.push(rest(lines[end], Math.min(lead, indent.length)));
    end += 1;
  }
  return { type: "code", name: name.trim(), inside, end: end + 1 };
}

function quoteAt(lines, n, deep) {
  const inside = [];
  let end = n;
  while (end < lines.length) {
    const mark = lines[end].text.match(QUOTE);
    const lazy = !mark && inside.length && !blank(lines[end]) && !beginsBlock(lines, end);
    if (!mark && !lazy) break;
    inside.push(mark ? rest(lines[end], mark[0].length) : lines[end]);
    end += 1;
  }
  return { type: "quote", blocks: blocksOf(inside, deep + 1), end };
}

function listAt(lines, n, deep) {
  const [, , first] = lines[n].text.match(ITEM);
  const ordered = /\d/.test(first);
  const kind = first.at(-1);
  const items = [];
  let end = n;
  let inside = null;
  let indent = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const lead = line.text.match(/^\s*/)[0].length;
    const item = line.text.match(ITEM);
    if (item && lead < 2 + (inside ? 0 : 2) && item[2].at(-1) === kind && !RULE.test(line.text)) {
      inside = [rest(line, item[0].length)];
      indent = item[0].length;
      items.push(inside);
    } else if (!inside) break;
    else if (blank(line)) {
      // A list goes on behind an empty line only with an item or an indented line.
      const next = lines.slice(end + 1).find((other) => !blank(other));
      const nextLead = next?.text.match(/^\s*/)[0].length ?? 0;
      const nextItem = next?.text.match(ITEM);
      if (!next || (nextLead < 2 && nextItem?.[2].at(-1) !== kind)) break;
      inside.push(line);
    } else if (lead >= 2) inside.push(rest(line, Math.min(lead, indent)));
    else if (beginsBlock(lines, end) || blank(lines[end - 1])) break;
    else inside.push(line);
  }
  return {
    type: "list",
    ordered,
    start: ordered ? parseInt(first, 10) : 1,
    items: items.map((item) => blocksOf(item, deep + 1)),
    end,
  };
}

/** Cells of a row, each with its place. */
function cellsOf(line) {
  const cells = [];
  let from = line.text.match(/^\s*\|?/)[0].length;
  for (let n = from; n <= line.text.length; n += 1) {
    if (line.text[n] === "\\") n += 1;
    else if (n >= line.text.length || line.text[n] === "|") {
      const raw = line.text.slice(from, n);
      if (n < line.text.length || raw.trim()) {
        const lead = raw.match(/^\s*/)[0].length;
        cells.push({ text: raw.trim(), at: line.at + from + lead });
      }
      from = n + 1;
    }
  }
  return cells;
}

function tableAt(lines, n) {
  const head = cellsOf(lines[n]);
  const rows = [];
  let end = n + 2;
  while (end < lines.length && !blank(lines[end]) && lines[end].text.includes("|")) {
    rows.push(cellsOf(lines[end]).slice(0, head.length));
    end += 1;
  }
  const sides = cellsOf(lines[n + 1]).map(({ text }) =>
    text.endsWith(":") ? (text.startsWith(":") ? "centre" : "right") : null,
  );
  return { type: "table", head, rows, sides, end };
}

function paragraphAt(lines, n, whole) {
  let end = n + 1;
  while (
    end < lines.length &&
    !blank(lines[end]) &&
    (whole || (!beginsBlock(lines, end) && !isTable(lines, end)))
  )
    end += 1;
  const inside = lines.slice(n, end).map((line) => {
    const lead = line.text.match(/^\s*/)[0].length;
    return rest(line, lead);
  });
  return { type: "paragraph", inside, end };
}

// Blocks to elements.

function elementOf(block, leaf) {
  const inline = (name, lines, properties) =>
    el(name, properties, ...inlineNodes(joined(lines), leaf));
  const children = (blocks) => blocks.map((inner) => elementOf(inner, leaf));
  switch (block.type) {
    case "heading":
      // Below the headings of the page, which name the speakers.
      return inline(`h${Math.min(6, block.level + 2)}`, block.inside);
    case "rule":
      return el("hr");
    case "code":
      return codeElement(block, leaf);
    case "quote":
      return el("blockquote", {}, ...children(block.blocks));
    case "list":
      return el(
        block.ordered ? "ol" : "ul",
        { start: block.start === 1 ? null : block.start },
        ...block.items.map((item) => el("li", {}, ...children(item))),
      );
    case "table": {
      const row = (cells, name, scope) =>
        el("tr", {}, ...cells.map((cell, n) => inline(name, [cell], { scope, class: block.sides[n] })));
      const table = el(
        "table",
        {},
        el("thead", {}, row(block.head, "th", "col")),
        el("tbody", {}, ...block.rows.map((cells) => row(cells, "td", null))),
      );
      return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table);
    }
    default:
      return inline("p", block.inside);
  }
}

function codeElement({ name, inside }, leaf) {
  const code = el("code");
  for (const [n, { text, at }] of inside.entries())
    code.append(...leaf(n + 1 < inside.length ? `${text}\n` : text, at));
  const text = inside.map((line) => line.text).join("\n");
  const button = iconButton("Copy the code", "copy", () => copy(text, button));
  const said = name ? `Code, ${name}` : "Code";
  return el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, name || "text"), button),
    el("pre", { tabindex: 0, role: "region", "aria-label": said }, code),
  );
}

// Text within a block.

/** Lines as one text; `at(n)` is the place in the source of its nth character. */
function joined(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const begins = [];
  let n = 0;
  for (const line of lines) {
    begins.push([n, line.at]);
    n += line.text.length + 1;
  }
  const at = (index) => {
    let low = 0;
    while (low + 1 < begins.length && begins[low + 1][0] <= index) low += 1;
    return begins[low][1] + index - begins[low][0];
  };
  return { text, at, begins };
}

function inlineNodes({ text, at, begins }, leaf) {
  const breaks = new Set(begins.slice(1).map(([n]) => n));
  /** Text as it stands, cut where a new line of the source begins. */
  const plain = (from, to) => {
    const nodes = [];
    let start = from;
    for (let n = from + 1; n <= to; n += 1) {
      if (n === to || breaks.has(n)) {
        nodes.push(...leaf(text.slice(start, n), at(start)));
        start = n;
      }
    }
    return nodes;
  };
  return span(text, 0, text.length, plain, 0);
}

const MARKS = [
  ["***", ["strong", "em"]],
  ["___", ["strong", "em"]],
  ["**", ["strong"]],
  ["__", ["strong"]],
  ["~~", ["del"]],
  ["*", ["em"]],
  ["_", ["em"]],
];
const LINK = /!?\[((?:[^[\]\\]|\\.)*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"']*["'])?\s*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_])>?/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;

/**
 * Where the mark at `from` is closed, or -1. `open` has the marks that nothing closes up to `to`:
 * nobody looks twice for what is not there.
 */
function closing(text, mark, from, to, open) {
  const begin = from + mark.length;
  if (open.has(mark) || begin >= to || /\s/.test(text[begin])) return -1;
  if (mark[0] === "_" && /\w/.test(text[from - 1] ?? " ")) return -1;
  for (let n = text.indexOf(mark, begin + 1); n !== -1 && n < to; n = text.indexOf(mark, n + 1)) {
    if (n + mark.length > to) break;
    if (/\s/.test(text[n - 1]) || text[n - 1] === "\\") continue;
    if (mark.length === 1 && (text[n + 1] === mark || text[n - 1] === mark)) {
      // Part of a double mark: it closes that one.
      while (text[n + 1] === mark) n += 1;
      continue;
    }
    if (mark[0] === "_" && /\w/.test(text[n + mark.length] ?? " ")) continue;
    return n;
  }
  open.add(mark);
  return -1;
}

function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, ...children) {
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function span(text, from, to, plain, deep) {
  const nodes = [];
  const open = new Set();
  let start = from;
  let n = from;
  const take = (end, ...made) => {
    nodes.push(...plain(start, n), ...made);
    n = end;
    start = end;
  };
  while (n < to) {
    const here = text[n];
    if (here === "\\" && n + 1 < to && PUNCTUATION.test(text[n + 1])) {
      take(n + 2, ...plain(n + 1, n + 2));
    } else if (here === "`") {
      const marks = text.slice(n).match(/^`+/)[0].length;
      const shut = new RegExp(`(?<!\`)\`{${marks}}(?!\`)`, "g");
      shut.lastIndex = n + marks;
      const found = shut.exec(text);
      if (found && found.index < to)
        take(found.index + marks, el("code", {}, ...plain(n + marks, found.index)));
      else n += marks;
    } else if ((here === "[" || (here === "!" && text[n + 1] === "[")) && deep < DEEPEST) {
      LINK.lastIndex = n;
      const found = LINK.exec(text);
      const address = found && n + found[0].length <= to && safeAddress(found[2]);
      if (address) {
        const begin = n + found[0].indexOf("[") + 1;
        take(
          n + found[0].length,
          link(address, ...span(text, begin, begin + found[1].length, plain, deep + 1)),
        );
      } else n += 1;
    } else if ((here === "<" || here === "h") && !/\w/.test(text[n - 1] ?? " ")) {
      ADDRESS.lastIndex = n;
      const found = ADDRESS.exec(text);
      const address = found && n + found[0].length <= to && safeAddress(found[1]);
      if (address && (here === "h" || found[0].endsWith(">"))) {
        const begin = n + (here === "<" ? 1 : 0);
        const end = begin + found[1].length;
        take(here === "<" ? n + found[0].length : end, link(address, ...plain(begin, end)));
      } else n += 1;
    } else if ("*_~".includes(here) && deep < DEEPEST) {
      const mark = MARKS.find(
        ([marks]) => text.startsWith(marks, n) && closing(text, marks, n, to, open) !== -1,
      );
      if (mark) {
        const [marks, names] = mark;
        const shut = closing(text, marks, n, to, open);
        const inside = span(text, n + marks.length, shut, plain, deep + 1);
        take(
          shut + marks.length,
          names.reduceRight((children, name) => [el(name, {}, ...children)], inside)[0],
        );
      } else {
        while (n < to && text[n] === here) n += 1;
      }
    } else n += 1;
  }
  nodes.push(...plain(start, to));
  return nodes;
}

/**
 * Shows `source` in `container`. Blocks that have not changed since the last call keep their nodes,
 * so that a long reply costs one block a piece and a selection stays.
 */
export function render(container, source, leaf) {
  const lines = linesOf(source);
  const shown = container.markdownBlocks ?? [];
  const blocks = blocksOf(lines).map((block, n) => {
    const last = lines[Math.min(block.end, lines.length) - 1];
    const raw = source.slice(block.from, last.at + last.text.length);
    const old = shown[n];
    if (old?.raw === raw && old.from === block.from && old.type === block.type) return old;
    const node = elementOf(block, leaf);
    if (old) old.node.replaceWith(node);
    else container.append(node);
    return { type: block.type, from: block.from, raw, node };
  });
  for (const gone of shown.slice(blocks.length)) gone.node.remove();
  container.markdownBlocks = blocks;
}
