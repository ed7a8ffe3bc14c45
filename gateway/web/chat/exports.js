// Export of conversations to Markdown and JSON files, and import of JSON.

import { make } from "../dom.js";
import { answerOf } from "./history.js";
import { pathTo } from "./tree.js";

const FORMAT = "millrace.chat";
const MOST_BYTES = 5_000_000;
const STATES = new Set(["done", "failed"]);

/** Download a conversation without a request; `kind` is "markdown" or "json". */
export function saveAs(kind, document) {
  if (kind === "json") save(fileName(document.title, "json"), "application/json", JSON.stringify(document, null, 1));
  else save(fileName(document.title, "md"), "text/markdown", markdownOf(document));
}

/** Return the visible turns of a conversation as Markdown. */
function markdownOf({ title, model, leaf, turns, parameters }) {
  const parts = [`# ${title}`];
  if (model) parts.push(`Model: ${model}`);
  if (parameters?.system) parts.push(`System prompt:\n\n${quoted(parameters.system)}`);
  for (const turn of pathTo(turns, leaf)) {
    parts.push("## Question", turn.question, "## Answer", answerOf(turn) || "(none)");
  }
  return `${parts.join("\n\n")}\n`;
}

const quoted = (text) => text.replace(/^/gm, "> ");

function save(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1_000);
}

function fileName(title, extension) {
  const stem = title.normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${stem.toLowerCase() || "conversation"}.${extension}`;
}

/** Parse an exported file; throw an Error that describes an invalid file. */
export async function readExport(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is too large.`);
  let document;
  try {
    document = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  if (document?.format !== FORMAT || document.version !== 1 || !Array.isArray(document.turns)) {
    throw new Error(`${file.name} is not a conversation that this page has exported.`);
  }
  const turns = document.turns.map(turnOf);
  if (turns.length === 0 || turns.includes(null)) throw new Error(`${file.name} is damaged.`);
  const { title, model, leaf, parameters } = document;
  return {
    title: text(title).slice(0, 120) || "Imported conversation",
    model: text(model),
    isRenamed: true,
    leaf: turns.some(({ id }) => id === leaf) ? leaf : turns.at(-1).id,
    parameters: parametersOf(parameters),
    turns,
  };
}

const text = (value) => (typeof value === "string" ? value : "");

/** Return the known fields of a turn; null for an invalid turn. */
function turnOf(given) {
  if (typeof given?.id !== "string" || typeof given.question !== "string") return null;
  if (!Array.isArray(given.parts) || !given.parts.every(isPart)) return null;
  const { id, question, parts } = given;
  const parent = typeof given.parent === "string" ? given.parent : null;
  const state = STATES.has(given.state) ? given.state : "failed";
  const failure = { code: "lost", message: text(given.error?.message) || "This answer is incomplete.", retryAtMs: 0 };
  const error = state === "failed" ? failure : null;
  const askedMs = Number(given.askedMs) || 0;
  return { id, parent, question, parts, state, askedMs, savedMs: askedMs, requestId: "", facts: {}, error };
}

function isPart(part) {
  if (part?.kind === "text") return typeof part.text === "string";
  const words = [part?.name, part?.arguments, part?.callId, part?.output ?? ""];
  return part?.kind === "tool" && words.every((word) => typeof word === "string");
}

function parametersOf(given) {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (Number.isFinite(given?.[name])) found[name] = given[name];
  }
  if (text(given?.system)) found.system = given.system;
  if (Array.isArray(given?.stop)) found.stop = given.stop.filter(text);
  return found;
}
