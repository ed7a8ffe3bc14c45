// Example questions.

import { button, byId, make } from "../dom.js";

const EXAMPLES = [
  "What's time to first token?",
  "How does continuous batching work?",
  "What happens when a worker dies?",
  "How does paged attention work?",
  "How do I publish a job?",
  "What does Millrace promise?",
];

/** Show the examples; `onAsk(question)` is called for the chosen question. */
export function showExamples(onAsk) {
  const items = EXAMPLES.map((question) => make("li", {}, button(question, () => onAsk(question))));
  byId("examples").append(...items);
}
