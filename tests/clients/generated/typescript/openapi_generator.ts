// Calls the API with the typescript-axios client of openapi-generator.
import type { Readable } from "node:stream";
import { isAxiosError } from "axios";
import {
  BatchesApi,
  Configuration,
  EmbeddingsApi,
  FilesApi,
  GenerationApi,
  ModelsApi,
} from "./client";
import type { ChatCompletionChunk, ChatCompletionRequest, ErrorBody } from "./client";

async function main(): Promise<void> {
  const configuration = new Configuration({ basePath: process.argv[2], accessToken: "none" });
  const generation = new GenerationApi(configuration);
  const model = "echo";
  const messages: ChatCompletionRequest["messages"] = [{ role: "user", content: "Hello there" }];

  const whole = await generation.createChatCompletion({ model, messages });
  const stream = await generation.createChatCompletion(
    { model, messages, stream: true },
    undefined,
    undefined,
    { responseType: "stream" },
  );
  let text = "";
  for await (const bytes of stream.data as unknown as Readable) text += String(bytes);
  let streamed = "";
  for (const line of text.split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const chunk = JSON.parse(line.slice(6)) as ChatCompletionChunk;
    for (const choice of chunk.choices) streamed += choice.delta.content ?? "";
  }

  await generation.createChatCompletion({
    model,
    messages,
    tools: [{ function: { name: "look", parameters: { type: "object", properties: {} } } }],
    tool_choice: "auto",
    stop: "!",
    temperature: 0.5,
  });
  const models = await new ModelsApi(configuration).listModels();
  const vectors = await new EmbeddingsApi(configuration).createEmbeddings({
    model,
    input: ["a", "b"],
  });
  const tokens = await new ModelsApi(configuration).tokenizeAtRoot({ model, prompt: "abc" });
  const file = await new FilesApi(configuration).uploadFile(
    new File(["{}"], "requests.jsonl"),
    "batch",
  );
  const answer = await generation.createResponse({
    model,
    input: [{ role: "user", content: "Hello there" }],
  });
  const part = answer.data.output[0].content[0];
  const message = await generation.createMessage({
    model,
    max_tokens: 20,
    messages: [{ role: "user", content: "Hello there" }],
  });
  const batches = await new BatchesApi(configuration).listBatches(5);
  let refused: string | undefined;
  try {
    await generation.createChatCompletion({ model: "absent", messages });
  } catch (error) {
    if (isAxiosError<ErrorBody>(error)) refused = error.response?.data.error.code;
  }

  console.log(
    JSON.stringify({
      whole: whole.data.choices[0].message.content,
      streamed,
      models: models.data.data.map((card) => card.id),
      embeddings: vectors.data.data.length,
      tokens: tokens.data.count,
      file: file.data.bytes,
      response: part.text,
      message: message.data.content[0].text,
      batches: batches.data.data.length,
      refused,
    }),
  );
}

void main();
