// Markdown in blocks, as nodes of the document: no markup is ever parsed from what a model writes.

import { button, copyText, make } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inlineNodes } from "./inline.js";

const MOST_DEPTH = 6;
const MOST_COLUMNS = 64;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;

/**
 * The blocks of a text, in order: `{kind, from, ...}`, where `from` is the line it begins with. The
 * kinds: paragraph, heading, code, quote, list, table, rule.
 */
export function blocksOf(lines, depth = 0) {
  const blocks = [];
  let place = 0;
  while (place < lines.length) {
    if (BLANK.test(lines[place])) {
      place += 1;
      continue;
    }
    const [block, next] = blockAt(lines, place, depth);
    blocks.push({ ...block, from: place });
    place = next;
  }
  return blocks;
}

function blockAt(lines, from, depth) {
  const line = lines[from];
  let match;
  if ((match = FENCE.exec(line))) return fenced(lines, from, match);
  if ((match = HEADING.exec(line))) {
    return [{ kind: "heading", level: match[1].length, text: match[2] ?? "" }, from + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, from + 1];
  if (depth < MOST_DEPTH) {
    if (QUOTE.test(line)) return quoted(lines, from, depth);
    if (ITEM.test(line)) return listed(lines, from, depth);
  }
  if (isTable(lines, from)) return tabled(lines, from);
  return paragraph(lines, from, depth);
}

function fenced(lines, from, [, fence, info]) {
  const isClosing = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = from + 1;
  while (end < lines.length && !isClosing(lines[end])) end += 1;
  const indent = /^ */.exec(lines[from])[0].length;
  const unindent = new RegExp(`^ {0,${indent}}`);
  const code = lines.slice(from + 1, end).map((line) => line.replace(unindent, ""));
  const language = info.trim().split(/\s+/)[0].slice(0, 30);
  return [{ kind: "code", language, text: code.join("\n"), closed: end < lines.length }, end + 1];
}

function quoted(lines, from, depth) {
  let end = from;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(from, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: blocksOf(inner, depth + 1) }, end];
}

function listed(lines, from, depth) {
  const [, , firstMark] = ITEM.exec(lines[from]);
  const ordered = /\d/.test(firstMark);
  const sort = firstMark.at(-1);
  const items = [];
  let loose = false;
  let place = from;
  while (place < lines.length) {
    const match = ITEM.exec(lines[place]);
    if (!match || match[2].at(-1) !== sort || RULE.test(lines[place])) break;
    const [whole, , mark, space] = match;
    const width = space.length > 4 || !space ? match[1].length + mark.length + 1 : whole.length;
    const inner = [lines[place].slice(Math.min(width, whole.length))];
    place += 1;
    while (place < lines.length) {
      const line = lines[place];
      const indent = /^ */.exec(line)[0].length;
      if (BLANK.test(line)) {
        let after = place;
        while (after < lines.length && BLANK.test(lines[after])) after += 1;
        const goesOn = after < lines.length && /^ */.exec(lines[after])[0].length >= width;
        if (!goesOn) break;
        loose = true;
        inner.push(...Array(after - place).fill(""));
        place = after;
      } else if (indent >= Math.min(width, 2)) {
        inner.push(line.slice(Math.min(indent, width)));
        place += 1;
      } else if (startsBlock(line)) break;
      else {
        inner.push(line);
        place += 1;
      }
    }
    items.push(itemOf(inner, depth));
    let next = place;
    while (next < lines.length && BLANK.test(lines[next])) next += 1;
    if (next > place && ITEM.exec(lines[next] ?? "")?.[2].at(-1) === sort) {
      loose = true;
      place = next;
    } else if (next > place) break;
  }
  const start = ordered ? Number.parseInt(firstMark, 10) : 1;
  return [{ kind: "list", ordered, start, loose, items }, place];
}

function itemOf(lines, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  return { checked: task ? task[1] !== " " : null, blocks: blocksOf(lines, depth + 1) };
}

function isTable(lines, from) {
  const divider = lines[from + 1];
  if (!lines[from].includes("|") || divider === undefined || !DIVIDER.test(divider)) return false;
  return cellsOf(lines[from]).length === cellsOf(divider).length;
}

function tabled(lines, from) {
  const header = cellsOf(lines[from]);
  const alignments = cellsOf(lines[from + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "start";
    return cell.startsWith(":") ? "center" : "end";
  });
  let end = from + 2;
  while (end < lines.length && !BLANK.test(lines[end]) && lines[end].includes("|")) end += 1;
  return [{ kind: "table", header, alignments, rows: lines.slice(from + 2, end).map(cellsOf) }, end];
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const cells = inner.split(/(?<!\\)\|/, MOST_COLUMNS);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function paragraph(lines, from, depth) {
  let end = from + 1;
  while (end < lines.length && !BLANK.test(lines[end])) {
    if (depth < MOST_DEPTH && startsBlock(lines[end])) break;
    if (isTable(lines, end)) break;
    end += 1;
  }
  const text = lines.slice(from, end).map((line) => line.trimStart());
  return [{ kind: "paragraph", text: text.join("\n").trimEnd() }, end];
}

// Blocks to nodes.

function nodeOf(block) {
  switch (block.kind) {
    case "paragraph":
      return make("p", {}, ...inlineNodes(block.text));
    case "heading":
      // The page has headings of its own above.
      return make(`h${Math.min(6, block.level + 2)}`, {}, ...inlineNodes(block.text));
    case "code":
      return codeNode(block);
    case "quote":
      return make("blockquote", {}, ...block.blocks.map(nodeOf));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return make("hr");
  }
}

function codeNode({ language, text, closed }) {
  const code = make("code", {});
  const copy = button("Copy", (pressed) => copyText(code.textContent, pressed), { class: "do" });
  const label = make("span", { class: "language" }, language || "code");
  const body = make("pre", { tabIndex: 0 }, code);
  const figure = make("figure", { class: "code" }, make("figcaption", {}, label, copy), body);
  fillCode(code, text, closed ? language : "");
  return figure;
}

function fillCode(code, text, language) {
  code.replaceChildren(...highlighted(text, language));
}

function listNode({ ordered, start, loose, items }) {
  const list = make(ordered ? "ol" : "ul", loose ? { class: "loose" } : {});
  if (ordered && start !== 1) list.start = start;
  for (const { checked, blocks } of items) {
    const item = make("li");
    if (checked !== null) {
      item.className = "task";
      item.append(make("input", { type: "checkbox", checked, disabled: true }));
    }
    const [first, ...rest] = blocks;
    if (first?.kind === "paragraph" && !loose) item.append(...inlineNodes(first.text));
    else if (first) item.append(nodeOf(first));
    item.append(...rest.map(nodeOf));
    list.append(item);
  }
  return list;
}

function tableNode({ header, alignments, rows }) {
  const row = (tag, cells) => {
    const made = make("tr");
    header.forEach((_name, i) => {
      const cell = make(tag, { class: alignments[i] }, ...inlineNodes(cells[i] ?? ""));
      if (tag === "th") cell.scope = "col";
      made.append(cell);
    });
    return made;
  };
  const body = make("tbody", {}, ...rows.map((cells) => row("td", cells)));
  const table = make("table", {}, make("thead", {}, row("th", header)), body);
  return make("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}

/** Shows a text that grows: what is finished stays, only the last block is made anew. */
export class Markdown {
  #root;
  #stable = 0; // characters of the text that make up the blocks before the last
  #last = [];
  #lastBlock = null;

  constructor(root) {
    this.#root = root;
  }

  /** The text must begin with what was shown before. */
  show(text) {
    const lines = text.slice(this.#stable).replaceAll("\t", "    ").split("\n");
    const blocks = blocksOf(lines.map((line) => line.replace(/\r$/, "")));
    if (blocks.length === 1 && this.#growsCode(blocks[0])) return;
    for (const node of this.#last) node.remove();
    const nodes = blocks.map(nodeOf);
    this.#root.append(...nodes);
    this.#last = nodes.slice(-1);
    this.#lastBlock = blocks.at(-1) ?? null;
    if (blocks.length > 1) this.#stable = this.#startOf(text, blocks.at(-1).from);
  }

  /** Code that is still written only gets its new lines, so that it can be selected meanwhile. */
  #growsCode(block) {
    const last = this.#lastBlock;
    if (block.kind !== "code" || block.closed || last?.kind !== "code") return false;
    if (block.language !== last.language || !block.text.startsWith(last.text)) return false;
    const code = this.#last[0].querySelector("code");
    code.append(block.text.slice(last.text.length));
    this.#lastBlock = block;
    return true;
  }

  #startOf(text, numLines) {
    let start = this.#stable;
    for (let line = 0; line < numLines; line++) start = text.indexOf("\n", start) + 1;
    return start;
  }
}
