// Formulas in LaTeX, found in Markdown and drawn by KaTeX, which loads with the first formula.

import { make } from "../dom.js";

const LIBRARY = "/static/vendor/katex/katex.js";
const STYLES = "/static/vendor/katex/katex.css";
const LONGEST = 4_000;
const MOST_DRAWN = 300;
const FENCES = [
  ["$$", "$$"],
  ["\\[", "\\]"],
];
const AMOUNT = /^\d[\d.,]*(?:[kKmMbB]\b)?\s+[A-Za-z]{2,}/;
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };

const drawn = new Map(); // rendered formulas by source, to be cloned
let loading = null;

/**
 * Extensions of marked. A formula's token has its whole `raw` source, the `text` between the marks,
 * and `isDisplay`; an unfinished formula has no text.
 */
export const formulaExtensions = [
  {
    name: "formulaBlock",
    level: "block",
    start: lineInParagraph,
    tokenizer: blockToken,
    renderer: (token) => `<p>${inlineHtml(token)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    tokenizer: (source, tokens) => inlineToken(source, tokens?.at(-1)?.raw ?? ""),
    renderer: inlineHtml,
  },
];

/** Return the position in the first paragraph at which a line begins a formula. */
function lineInParagraph(source) {
  const end = source.indexOf("\n\n");
  const place = (end < 0 ? source : source.slice(0, end)).search(/\n(?:\$\$|\\\[)/);
  return place < 0 ? undefined : place + 1;
}

function blockToken(source) {
  const indent = /^ {0,3}/.exec(source)[0].length;
  const fence = FENCES.find(([opening]) => source.startsWith(opening, indent));
  if (!fence) return undefined;
  const paragraph = source.search(/\n[ \t]*\n/);
  const room = paragraph < 0 ? source : source.slice(0, paragraph);
  const [opening, closing] = fence;
  const end = room.indexOf(closing, indent + opening.length);
  // The rest of the paragraph is not Markdown while the formula is unfinished.
  if (end < 0) return { type: "formulaBlock", raw: room, isDisplay: true };
  const after = end + closing.length;
  if (!/^[ \t]*(?:\n|$)/.test(room.slice(after))) return undefined; // the line continues after the formula
  const text = room.slice(indent + opening.length, end);
  return { type: "formulaBlock", raw: room.slice(0, after), text, isDisplay: true };
}

function inlineToken(source, before) {
  for (const [opening, closing, isDisplay] of [
    ["$$", "$$", true],
    ["\\[", "\\]", true],
    ["\\(", "\\)", false],
  ]) {
    if (!source.startsWith(opening)) continue;
    const end = source.indexOf(closing, opening.length);
    if (end <= opening.length || end > LONGEST) return undefined;
    const text = source.slice(opening.length, end);
    return { type: "formula", raw: source.slice(0, end + closing.length), text, isDisplay };
  }
  if (source[0] !== "$") return undefined;
  const text = betweenDollars(source, before);
  return text ? { type: "formula", raw: `$${text}$`, text, isDisplay: false } : undefined;
}

/** Inline formulas by Pandoc's rules, which exclude money: `$5 and $10`, `US$5`, `$5 to x$`. */
function betweenDollars(source, before) {
  if (/[\w$\\]$/.test(before) || /^\$[\s$]/.test(source)) return "";
  let end = 1;
  do {
    end = source.indexOf("$", end + 1);
  } while (end > 0 && source[end - 1] === "\\");
  if (end < 2 || end > LONGEST) return "";
  const text = source.slice(1, end);
  if (/\s$/.test(text) || /^[\w$]/.test(source.slice(end + 1)) || AMOUNT.test(text)) return "";
  return text;
}

function inlineHtml({ raw, text, isDisplay }) {
  const kind = `formula${isDisplay ? " display" : ""}${text === undefined ? " open" : ""}`;
  return `<code class="${kind}">${escaped(raw.trim())}</code>`;
}

const escaped = (text) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);

/** Draw the formulas in an element, now or after KaTeX has loaded. */
export function drawFormulas(root) {
  const found = root.querySelectorAll("code.formula:not(.open, .broken)");
  if (found.length === 0) return;
  if (!globalThis.katex) {
    loading ??= load();
    loading.then(() => globalThis.katex && drawFormulas(root));
    return;
  }
  for (const code of found) draw(code);
}

function load() {
  document.head.append(make("link", { rel: "stylesheet", href: STYLES }));
  // If KaTeX cannot load, the source stays visible, and the next formula tries again.
  return import(LIBRARY).catch(() => (loading = null));
}

/** Render a formula; show the source of invalid LaTeX with the error as its title. */
function draw(code) {
  const source = code.textContent;
  const displayMode = code.classList.contains("display");
  if (!drawn.has(source)) {
    const made = make("span", { class: displayMode ? "math display" : "math" });
    if (displayMode) made.tabIndex = 0;
    try {
      globalThis.katex.render(withoutMarks(source), made, { ...OPTIONS, displayMode });
      drawn.set(source, made);
    } catch (error) {
      drawn.set(source, error.message);
    }
    if (drawn.size > MOST_DRAWN) drawn.delete(drawn.keys().next().value);
  }
  const made = drawn.get(source);
  if (typeof made !== "string") {
    code.replaceWith(made.cloneNode(true));
    return;
  }
  code.classList.add("broken");
  code.title = made;
}

function withoutMarks(source) {
  const width = source[0] === "$" && source[1] !== "$" ? 1 : 2;
  return source.slice(width, -width);
}
