// Syntax highlighting of comments, strings, numbers and keywords that many languages share.

import { make } from "../dom.js";

const LONGEST_CHARACTERS = 30_000;
const WORDS = new Set(
  `abstract and as assert async await bool boolean break case catch char class const continue def
  default defer del do double elif else enum except export extends false False final finally float
  fn for from func function global go if impl implements import in instanceof int interface is
  lambda let long loop match mod mut namespace new nil None nonlocal not null nullptr or override
  package pass private protected pub public raise range return self short signed sizeof static
  string struct super switch template this throw throws trait true True try type typedef typename
  typeof undefined unsafe unsigned use using var virtual void where while with yield
  SELECT FROM WHERE AND OR NOT GROUP BY ORDER LIMIT INSERT INTO VALUES UPDATE SET DELETE JOIN ON AS
  CREATE TABLE INDEX echo fi then esac done`.split(/\s+/),
);
const HASH = new Set(
  "python py bash sh shell zsh yaml yml toml ruby rb r perl make makefile dockerfile conf ini".split(" "),
);
const DASHES = new Set("sql lua haskell hs".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "console", "output", "diff", "markdown", "md"]);

const STRING = String.raw`"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`;
const TEMPLATE = "`(?:\\\\.|[^`\\\\])*`";
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORD = String.raw`\b[A-Za-z_]\w*\b`;

/**
 * Return the code as nodes: text, and spans of class "comment", "string", "number" and "keyword".
 */
export function highlighted(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > LONGEST_CHARACTERS) return [code];
  const nodes = [];
  let place = 0;
  for (const match of code.matchAll(patternFor(name))) {
    const kind = kindOf(match);
    if (!kind) continue;
    if (match.index > place) nodes.push(code.slice(place, match.index));
    nodes.push(make("span", { class: kind }, match[0]));
    place = match.index + match[0].length;
  }
  nodes.push(code.slice(place));
  return nodes;
}

function patternFor(name) {
  let comment = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
  let string = `${STRING}|${TEMPLATE}`;
  if (HASH.has(name)) {
    comment = "#[^\\n]*";
    string = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|` + STRING;
  } else if (DASHES.has(name)) comment = "--[^\\n]*";
  else if (name === "html" || name === "xml") comment = "<!--[^]*?(?:-->|$)";
  else if (name === "json") comment = "(?!)";
  return new RegExp(`(${comment})|(${string})|(${NUMBER})|(${WORD})`, "g");
}

function kindOf([word, comment, string, number]) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  return WORDS.has(word) ? "keyword" : "";
}
