// A service that publishes jobs with @nats-io: it reads frames and results, and cancels.
// Prints what happened as one JSON object.

import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect, headers } from "@nats-io/transport-node";

const { NATS_URL, NATS_USER, NATS_PASSWORD, TENANT } = process.env;
const ENDS = ["done", "cancelled", "expired", "shed", "failed"];

const connection = await connect({
  servers: NATS_URL,
  user: NATS_USER,
  pass: NATS_PASSWORD,
  inboxPrefix: `_INBOX.service.${TENANT}`,
});
const frames = connection.subscribe(`tok.${TENANT}.>`);
const incoming = frames[Symbol.asyncIterator]();

async function publish(id, maxTokens) {
  const withHeaders = headers();
  withHeaders.set("Content-Type", "application/json");
  const job = {
    request_id: id,
    model: "demo",
    prompt: "What is a lease?",
    sampling: { max_tokens: maxTokens, ignore_eos: true, seed: 1 },
    reply: TENANT,
    store_result: true,
  };
  await jetstream(connection).publish(`jobs.demo.free.${TENANT}`, JSON.stringify(job), {
    headers: withHeaders,
    msgID: id,
  });
}

async function frameOf(id) {
  for (;;) {
    const { value: message } = await incoming.next();
    if (message.subject === `tok.${TENANT}.${id}`) return message.json();
  }
}

async function endOf(id) {
  let text = "";
  for (;;) {
    const frame = await frameOf(id);
    text += frame.text ?? "";
    if (ENDS.includes(frame.type)) return [frame.type, text];
  }
}

async function ask(subject) {
  return (await connection.request(subject, "", { timeout: 2000 })).json();
}

async function resultOf(id) {
  for (;;) {
    const answer = await ask(`ctl.result.${TENANT}.${id}`);
    if (!answer.error?.retryable) return answer;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

await publish("node-1", 20);
const [end, text] = await endOf("node-1");
const asked = await resultOf("node-1");
const manager = await jetstreamManager(connection, { checkAPI: false });
const subject = `results.${TENANT}.node-1`;
const stored = (await manager.direct.getMessage("RESULTS", { last_by_subj: subject })).json();

await publish("node-2", 2000);
while ((await frameOf("node-2")).type !== "delta");
connection.publish(`ctl.cancel.${TENANT}.node-2`);
const [cancelled] = await endOf("node-2");

const unknown = await ask(`ctl.result.${TENANT}.never`);
const foreign = await ask("ctl.result.shop.node-1").then(
  () => true,
  () => false,
);
console.log(JSON.stringify({ end, text, asked, stored, cancelled, unknown, foreign }));
await connection.close();
