// Markdown within a line: emphasis, code, links. Text is text; nothing in it becomes markup.

import { make } from "./dom.js";

const MOST_DEPTH = 6;
const LONGEST_LABEL = 500;
const LONGEST_URL = 2_000;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ESCAPED = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const BARE_URL = /https?:\/\/[^\s<>"'`]+/y;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TAGS = { 1: "em", 2: "strong" };
const WORD = /[\p{L}\p{N}]/u;

/** The nodes of a line or paragraph. */
export function inlineNodes(text, depth = 0) {
  return new Scanner(text, depth).nodes();
}

/** The address, if it may be followed: absolute, of a scheme that runs no code. */
export function safeUrl(address) {
  if (address.length > LONGEST_URL || !URL.canParse(address)) return null;
  const url = new URL(address);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

class Scanner {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.place = 0;
    this.plain = "";
    this.found = [];
    // Marks that nothing closes from here on: looked for once, not once for each.
    this.unclosed = new Set();
  }

  nodes() {
    const { text } = this;
    while (this.place < text.length) {
      SPECIAL.lastIndex = this.place;
      const next = SPECIAL.exec(text);
      const at = next ? next.index : text.length;
      this.plain += text.slice(this.place, at);
      this.place = at;
      if (next && !this.special(next[0])) {
        this.plain += text[this.place];
        this.place += 1;
      }
    }
    this.flush();
    return this.found;
  }

  /** Take what begins here; false if it is nothing but text. */
  special(mark) {
    switch (mark) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
        return this.emphasis(mark);
      case "~":
        return this.strike();
      case "!":
        return this.text[this.place + 1] === "[" && this.link(this.place + 1, "image");
      case "[":
        return this.link(this.place, "");
      case "<":
        return this.address(ANGLE_URL);
      case "\n":
        return this.lineEnd();
      default:
        return this.bareUrl();
    }
  }

  push(node, end) {
    this.flush();
    this.found.push(node);
    this.place = end;
    return true;
  }

  flush() {
    if (this.plain) this.found.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  inner(from, to) {
    const text = this.text.slice(from, to);
    return this.depth < MOST_DEPTH ? inlineNodes(text, this.depth + 1) : [text];
  }

  escape() {
    const next = this.text[this.place + 1];
    if (next === "\n") return this.push(make("br"), this.place + 2);
    if (!next || !ESCAPED.test(next)) return false;
    this.plain += next;
    this.place += 2;
    return true;
  }

  lineEnd() {
    const isHard = this.plain.endsWith("  ");
    this.plain = this.plain.trimEnd();
    if (isHard) return this.push(make("br"), this.place + 1);
    this.plain += "\n";
    this.place += 1;
    return true;
  }

  code() {
    const length = this.runLength("`");
    const end = this.find("`".repeat(length), this.place + length, (at) => {
      return this.text[at - 1] !== "`" && this.text[at + length] !== "`";
    });
    if (end < 0) {
      this.plain += "`".repeat(length);
      this.place += length;
      return true;
    }
    let code = this.text.slice(this.place + length, end).replaceAll("\n", " ");
    if (code.length > 2 && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
    return this.push(make("code", {}, code), end + length);
  }

  emphasis(mark) {
    const { text, place } = this;
    const run = this.runLength(mark);
    const length = Math.min(run, 3);
    const before = text[place - 1] ?? " ";
    const after = text[place + run] ?? " ";
    const opens = run <= 3 && /\S/.test(after) && !(mark === "_" && WORD.test(before));
    const end = opens ? this.closing(mark, length, place + length) : -1;
    if (end < 0) {
      this.plain += mark.repeat(run);
      this.place += run;
      return true;
    }
    const inner = this.inner(place + length, end);
    const node =
      length === 3 ? make("em", {}, make("strong", {}, ...inner)) : make(TAGS[length], {}, ...inner);
    return this.push(node, end + length);
  }

  closing(mark, length, from) {
    return this.find(mark.repeat(length), from, (at) => {
      const { text } = this;
      if (text[at + length] === mark || text[at - 1] === "\\") return false;
      // Of three marks, the first may close what was opened within.
      let run = length;
      while (run <= 3 && text[at + length - run - 1] === mark) run += 1;
      if (run !== length && run !== 3) return false;
      if (at === from || /\s/.test(text[at - 1])) return false;
      return !(mark === "_" && WORD.test(text[at + length] ?? " "));
    });
  }

  strike() {
    if (this.runLength("~") !== 2) return false;
    const from = this.place + 2;
    const end = this.find("~~", from, (at) => at > from);
    return end >= 0 && this.push(make("del", {}, ...this.inner(from, end)), end + 2);
  }

  /** Where `mark` stands from `from` on so that `fits`; -1 if nowhere. */
  find(mark, from, fits) {
    if (this.unclosed.has(mark)) return -1;
    for (let at = this.text.indexOf(mark, from); at >= 0; at = this.text.indexOf(mark, at + 1)) {
      if (fits(at)) return at;
    }
    this.unclosed.add(mark);
    return -1;
  }

  runLength(mark) {
    let end = this.place;
    while (this.text[end] === mark) end += 1;
    return end - this.place;
  }

  /** `[label](address "title")`; of an image only the link is made, so nothing is loaded. */
  link(open, kind) {
    const close = this.closingBracket(open);
    if (close < 0 || this.text[close + 1] !== "(") return false;
    const end = this.closingParenthesis(close + 1);
    if (end < 0) return false;
    const target = this.text.slice(close + 2, end).trim();
    const [, angled, plain] = /^(?:<([^<>\n]*)>|([^\s]*))(?:\s+["'(].*)?$/s.exec(target) ?? [];
    const url = safeUrl(angled ?? plain ?? "");
    const label = this.inner(open + 1, close);
    // What must not be followed is shown as it was written.
    if (!url) return this.push(document.createTextNode(this.text.slice(this.place, end + 1)), end + 1);
    if (label.length === 0) label.push(url);
    return this.push(anchor(url, label, kind), end + 1);
  }

  closingBracket(open) {
    let depth = 0;
    const last = Math.min(this.text.length, open + LONGEST_LABEL);
    for (let at = open; at < last; at++) {
      if (this.text[at] === "\\") at += 1;
      else if (this.text[at] === "[") depth += 1;
      else if (this.text[at] === "]" && --depth === 0) return at;
    }
    return -1;
  }

  closingParenthesis(open) {
    let depth = 0;
    const last = Math.min(this.text.length, open + LONGEST_URL);
    for (let at = open; at < last; at++) {
      if (this.text[at] === "\n") return -1;
      if (this.text[at] === "(") depth += 1;
      else if (this.text[at] === ")" && --depth === 0) return at;
    }
    return -1;
  }

  address(pattern) {
    pattern.lastIndex = this.place;
    const found = pattern.exec(this.text);
    const url = found && safeUrl(found[1]);
    return url ? this.push(anchor(url, [found[1]]), this.place + found[0].length) : false;
  }

  bareUrl() {
    if (WORD.test(this.text[this.place - 1] ?? " ")) return false;
    BARE_URL.lastIndex = this.place;
    const whole = BARE_URL.exec(this.text)?.[0] ?? "";
    if (whole.length > LONGEST_URL) {
      this.plain += whole;
      this.place += whole.length;
      return true;
    }
    let address = whole.replace(/[.,:;!?*_~\]]+$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    const url = safeUrl(address);
    return url ? this.push(anchor(url, [address]), this.place + address.length) : false;
  }
}

function anchor(url, label, kind = "") {
  const properties = { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" };
  if (kind) properties.class = kind;
  return make("a", properties, ...label);
}
