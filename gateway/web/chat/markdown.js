// Markdown rendered to DOM nodes. HTML in a model's output stays text; DOMPurify admits only the
// elements and attributes that Markdown needs.

import { button, copyText, make } from "../dom.js";
import { drawFormulas, formulaExtensions } from "./formulas.js";
import { highlighted } from "./highlight.js";
import { Marked, Tokenizer } from "/static/vendor/marked.js";
import "/static/vendor/purify.js";

const MOST_DEPTH = 6;
const LONGEST_URL = 2_000;
const LONGEST_LANGUAGE = 30;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const CLOSED_FENCE = /^ {0,3}(`{3,}|~{3,})[^\n]*\n(?:[^]*\n)? {0,3}\1[`~]*\s*$/;
const WEB_ADDRESS = /^https?:\/\//i;
const TEXT = /^(?:`+|[^])[^]*?(?=[\\<![`*_~$\n]| {2,}\n|https?:\/\/|$)/i;
const ALLOWED = {
  ALLOWED_TAGS: `a blockquote br code del em h3 h4 h5 h6 hr input li ol p pre strong table tbody td th
    thead tr ul`.split(/\s+/),
  ALLOWED_ATTR: ["checked", "class", "disabled", "href", "rel", "scope", "start", "target", "title", "type"],
  RETURN_DOM_FRAGMENT: true,
};

/** Markdown without markup and without definitions of links, which would change blocks above. */
class ChatTokenizer extends Tokenizer {
  #depth = 0;

  html() {}
  tag() {}
  def() {}

  /** Do not search for addresses without a scheme, which is slow in text without spaces. */
  url(source) {
    return WEB_ADDRESS.test(source) ? super.url(source) : undefined;
  }

  inlineText(source) {
    const [raw] = TEXT.exec(source);
    return { type: "text", raw, text: raw };
  }

  blockquote(source) {
    return this.#nested(() => super.blockquote(source));
  }

  list(source) {
    return this.#nested(() => super.list(source));
  }

  #nested(read) {
    if (this.#depth === MOST_DEPTH) return undefined;
    this.#depth += 1;
    try {
      return read();
    } finally {
      this.#depth -= 1;
    }
  }
}

const renderer = {
  // Heading levels start below the page's own headings.
  heading({ tokens, depth }) {
    const tag = `h${Math.min(6, depth + 2)}`;
    return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
  },

  text({ tokens, text }) {
    return tokens ? this.parser.parseInline(tokens) : escaped(text);
  },

  /** Keep line breaks in the text too, so that search and copy see them. */
  br() {
    return "<br>\n";
  },

  list({ ordered, start, loose, items }) {
    const tag = ordered ? "ol" : "ul";
    const first = ordered && start !== 1 ? ` start="${start}"` : "";
    const body = items.map((item) => this.listitem(item)).join("");
    return `<${tag}${first}${loose ? ' class="loose"' : ""}>${body}</${tag}>`;
  },

  listitem({ task, tokens }) {
    return `<li${task ? ' class="task"' : ""}>${this.parser.parse(tokens)}</li>`;
  },

  tablecell({ header, align, tokens }) {
    const side = { right: "end", center: "center" }[align] ?? "start";
    const cell = this.parser.parseInline(tokens);
    return header ? `<th scope="col" class="${side}">${cell}</th>` : `<td class="${side}">${cell}</td>`;
  },

  link({ href, raw, tokens }) {
    return anchor(href, raw, this.parser.parseInline(tokens));
  },

  /** Render an image as a link, so that nothing is loaded. */
  image({ href, raw, text }) {
    return anchor(href, raw, escaped(text), ' class="image"');
  },
};

const marked = new Marked({ breaks: true, renderer, extensions: formulaExtensions }).setOptions({
  tokenizer: new ChatTokenizer(),
});

function escaped(text) {
  return text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** Show a forbidden link as its source text. */
function anchor(address, raw, label, properties = "") {
  const url = safeUrl(address);
  if (!url) return escaped(raw);
  const href = escaped(url);
  return `<a href="${href}" title="${href}" target="_blank" rel="noopener noreferrer nofollow"${properties}>${label || href}</a>`;
}

/** Return the address if it is absolute and its scheme runs no code, else null. */
function safeUrl(address) {
  if (address.length > LONGEST_URL || !URL.canParse(address)) return null;
  const url = new URL(address);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

/** Return the element of each block, with additions that Markdown lacks. */
function elementsOf(blocks) {
  const fragment = DOMPurify.sanitize(marked.parser(blocks), ALLOWED);
  const growing = isGrowing(blocks.at(-1)) ? fragment.lastElementChild : null;
  for (const table of fragment.querySelectorAll("table")) {
    const frame = make("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const box of fragment.querySelectorAll("input")) box.ariaLabel = box.checked ? "Done" : "To do";
  for (const code of fragment.querySelectorAll("pre > code")) {
    const body = code.parentElement;
    const language = /language-(\S+)/.exec(code.className)?.[1].slice(0, LONGEST_LANGUAGE) ?? "";
    body.replaceWith(codeFigure(code.textContent.replace(/\n$/, ""), language, body !== growing));
  }
  return [...fragment.children];
}

function codeFigure(text, language, isComplete) {
  const code = make("code", {}, ...highlighted(text, isComplete ? language : ""));
  const copy = button("Copy", (pressed) => copyText(code.textContent, pressed), { class: "do" });
  const label = make("span", { class: "language" }, language || "code");
  const body = make("pre", { tabIndex: 0 }, code);
  return make("figure", { class: "code" }, make("figcaption", {}, label, copy), body);
}

const isGrowing = (block) => block?.type === "code" && !CLOSED_FENCE.test(block.raw);

/** View of a growing text: finished blocks stay, only the last block is rendered again. */
export class Markdown {
  #root;
  #finished = 0; // number of characters in finished blocks
  #last = []; // elements of the unfinished text
  #lastBlock = null;

  constructor(root) {
    this.#root = root;
  }

  /** `text` must begin with the text shown before. */
  show(text) {
    const source = text.replaceAll("\r", "");
    const tokens = marked.lexer(source.slice(this.#finished));
    const blocks = tokens.filter(({ type }) => type !== "space");
    const last = blocks.at(-1);
    if (blocks.length === 1 && this.#growsCode(last)) return;
    for (const element of this.#last) element.remove();
    this.#last = elementsOf(blocks);
    this.#lastBlock = last;
    this.#root.append(...this.#last);
    this.#last.forEach(drawFormulas);
    // The next line may still join the previous block, such as a list item.
    if (!last?.raw.includes("\n")) return;
    this.#last = this.#last.slice(-1);
    const before = tokens.slice(0, tokens.indexOf(last));
    this.#finished += before.reduce((sum, { raw }) => sum + raw.length, 0);
  }

  /** Append only new lines to growing code, so that it can be selected meanwhile. */
  #growsCode(block) {
    const last = this.#lastBlock;
    if (!isGrowing(block) || last?.type !== "code" || this.#last.length !== 1) return false;
    if (block.lang !== last.lang || !block.text.startsWith(last.text)) return false;
    this.#last[0].querySelector("code").append(block.text.slice(last.text.length));
    this.#lastBlock = block;
    return true;
  }
}
