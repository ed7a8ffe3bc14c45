// Calls the API with the client that @hey-api/openapi-ts generates.
import {
  createChatCompletion,
  createEmbeddings,
  createMessage,
  createResponse,
  listBatches,
  listModels,
  tokenizeAtRoot,
  uploadFile,
} from "./client";
import type { ChatCompletionChunk, ChatCompletionRequest } from "./client";
import { client } from "./client/client.gen";

async function main(): Promise<void> {
  client.setConfig({ baseUrl: process.argv[2], auth: "none" });
  const model = "echo";
  const messages: ChatCompletionRequest["messages"] = [{ role: "user", content: "Hello there" }];

  const whole = await createChatCompletion({ body: { model, messages }, throwOnError: true });
  const stream = await createChatCompletion({
    body: { model, messages, stream: true },
    parseAs: "stream",
    throwOnError: true,
  });
  let text = "";
  const decoder = new TextDecoder();
  for await (const bytes of stream.data as unknown as AsyncIterable<Uint8Array>) {
    text += decoder.decode(bytes, { stream: true });
  }
  let streamed = "";
  for (const line of text.split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const chunk = JSON.parse(line.slice(6)) as ChatCompletionChunk;
    for (const choice of chunk.choices) streamed += choice.delta.content ?? "";
  }

  await createChatCompletion({
    body: {
      model,
      messages,
      tools: [{ function: { name: "look", parameters: { type: "object", properties: {} } } }],
      tool_choice: "auto",
      stop: "!",
      temperature: 0.5,
    },
    throwOnError: true,
  });
  const models = await listModels({ throwOnError: true });
  const vectors = await createEmbeddings({ body: { model, input: ["a", "b"] }, throwOnError: true });
  const tokens = await tokenizeAtRoot({ body: { model, prompt: "abc" }, throwOnError: true });
  const file = await uploadFile({
    body: { file: new File(["{}"], "requests.jsonl"), purpose: "batch" },
    throwOnError: true,
  });
  const answer = await createResponse({
    body: { model, input: [{ role: "user", content: "Hello there" }] },
    throwOnError: true,
  });
  const item = answer.data.output[0];
  const part = item.type === "message" ? item.content[0] : undefined;
  const message = await createMessage({
    body: { model, max_tokens: 20, messages: [{ role: "user", content: "Hello there" }] },
    throwOnError: true,
  });
  const block = message.data.content[0];
  const batches = await listBatches({ query: { limit: 5 }, throwOnError: true });
  const refused = await createChatCompletion({ body: { model: "absent", messages } });

  console.log(
    JSON.stringify({
      whole: whole.data.choices[0].message.content,
      streamed,
      models: models.data.data.map((card) => card.id),
      embeddings: vectors.data.data.length,
      tokens: tokens.data.count,
      file: file.data.bytes,
      response: part?.text,
      message: block.type === "text" ? block.text : undefined,
      batches: batches.data.data.length,
      refused: refused.error?.error.code,
    }),
  );
}

void main();
